"""Small models of transformers, with the same weights in every test.

`read_folder` reads one and fails unless every tensor of its folder found its place.
"""

import torch
import transformers

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 48}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2}


def seeded(kind, config):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return getattr(transformers, f"{kind}{'HeadModel' if 'GPT2' in kind else 'ForCausalLM'}")(
            config
        )


def llama(tied=True, **options):
    return seeded(
        "Llama", transformers.LlamaConfig(**{**SIZES, **options}, tie_word_embeddings=tied)
    )


def gpt2(tied=True, **options):
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 16, "vocab_size": 48}
    sizes |= dict.fromkeys(
        ("bos_token_id", "eos_token_id", "pad_token_id", "resid_pdrop", "embd_pdrop"), 0
    )
    return seeded(
        "GPT2LM",
        transformers.GPT2Config(**{**sizes, **options}, attn_pdrop=0.0, tie_word_embeddings=tied),
    )


def read_folder(folder, **options):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, **options
    )
    assert not any(info.values()), info
    return model


def logits(model):
    with torch.no_grad():
        return model.eval()(torch.arange(12).view(2, 6)).logits


def numbers_tokenizer():
    import tokenizers

    words = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *map(str, range(45))])}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(
            tokenizers.models.WordLevel(words, unk_token="<unk>")
        ),
        pad_token="<pad>",
        eos_token="</s>",
    )
