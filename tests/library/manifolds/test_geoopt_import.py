"""geoopt is imported when a manifold is asked for, and weights made before are its own.

Programs run in processes that have not imported geoopt, as this one has.
"""

import pickle
from textwrap import dedent

import geoopt
import pytest
from fresh_programs import outputs_of
from geoopt_cases import (
    RATES,
    model,
    word_after_geoopt,
    word_of,
    words_of_files,
    write_files,
)

import fp8manifold as fm
from fp8manifold._geoopt_import import PARAMETER_METHODS

SETUP = """
import sys, torch, warnings
import geoopt_cases as cases, fp8manifold as fm
"""
GEOOPT_FIRST = """
import warnings
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import geoopt
"""
WITHOUT = {
    "all names": "from fp8manifold import *",
    "train, save and copy": "cases.train_and_save()",
    "ask about classes": """
        import inspect, pydoc
        pydoc.render_doc(fm.FP8Manifold), inspect.signature(fm.StiffnessManifold)
        issubclass(fm.FP8Manifold, fm.StiffnessManifold)
        isinstance(cases.model()[0].weight, fm.StiffnessManifold)
    """,
}
WITH = {
    "a manifold of a weight": "cases.model()[0].weight.manifold",
    "a manifold": "fm.StiffnessManifold('E4M3')",
    "a layer on the grid": "cases.model(storage='grid')",
    "a manifold in a pickle": "cases.read('FOLDER/manifold')",
    "a method of geoopt": "cases.model()[0].weight.retr(torch.zeros(32, 64))",
    "a Riemannian step of floats": """
        bias = torch.nn.Parameter(torch.ones(3))
        bias.sum().backward()
        fm.optim.RiemannianAdam([bias]).step()
    """,
}
MADE = {
    "and not imported": "",
    "before the import": "import geoopt.tensor",
    "before a training step and the import": """
        other = cases.model()
        cases.step(other, fm.optim.StiffnessAdamW(other.parameters()))
        import geoopt
    """,
    "before an import that failed": """
        sys.modules["scipy.optimize"] = None
        try:
            import geoopt
        except ImportError:
            pass
        assert "geoopt" not in sys.modules
        cases.gradients(cases.model())
        del sys.modules["scipy.optimize"]
    """,
    "before an import by another finder": """
        from importlib.machinery import PathFinder
        sys.meta_path.insert(0, PathFinder)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import geoopt
        fm.optim.StiffnessAdamW([torch.nn.Parameter(torch.ones(2))])
    """,
}
"""What is done between the making of a model, ``net``, and its use with geoopt."""
RELATIONS = """
import geoopt
weight = net[0].weight
kinds = (geoopt.ManifoldParameter, geoopt.ManifoldTensor, torch.nn.Parameter, fm.FP8Tensor)
print(all(isinstance(weight, kind) for kind in kinds))
print(type(weight) is fm.FP8Parameter is weight.__class__)
print(issubclass(fm.FP8Manifold, geoopt.Manifold), weight.manifold.name)
print(isinstance(weight.detach().dequantize(), geoopt.ManifoldParameter))
print(isinstance(geoopt.ManifoldParameter(torch.ones(2)), fm.FP8Parameter))
"""
OTHERS = {
    "classes of users": (
        """
        class Weight(fm.FP8Parameter):
            pass
        class Grid(fm.FP8Manifold):
            def __init__(self):
                super().__init__("E4M3", 0.5)
        weight = Weight(torch.ones(2, 2), "E4M3")
        print(cases.imported())
        grid = Grid()
        import geoopt
        print(isinstance(weight, geoopt.ManifoldParameter), isinstance(grid, geoopt.Manifold))
        print(torch.equal(weight.retr(torch.zeros(2, 2)), torch.ones(2, 2)))
        print(grid.retr_transp(torch.ones(2), torch.zeros(2), torch.ones(2))[0].tolist())
        """,
        ["[]", "True True", "True", "[1.0, 1.0]"],
    ),
    "methods that hide those of torch": (
        """
        weight, other = cases.model()[0].weight, torch.ones(32, 64)
        print(cases.imported())
        before = weight.inner(other), weight.dist(other, p="g")
        after = weight.inner(other), weight.dist(other, p="g")
        manifold = weight.manifold
        expected = manifold.inner(weight, other), manifold.dist(weight, other)
        print(*[torch.equal(x, y) for x, y in zip(before + after, expected * 2)])
        """,
        ["[]", "True True True True"],
    ),
    "compiled code": (
        """
        net, x = cases.model(), torch.ones(3, 64)
        compiled = torch.compile(net, backend="aot_eager")
        before = compiled(x)
        print(cases.imported())
        import geoopt
        torch._dynamo.config.error_on_recompile = True
        print(torch.equal(compiled(x), before))
        """,
        ["[]", "True"],
    ),
}


def programs():
    """Return the programs by the test and the case that they are for."""
    texts = {}
    for name, program in WITHOUT.items():
        texts[f"without {name}"] = f"{dedent(program)}\nprint(cases.imported())"
    for name, program in WITH.items():
        program = f"print(cases.imported())\n{dedent(program)}\nprint(cases.imported())"
        texts[f"with {name}"] = program
    for name, program in MADE.items():
        program = f"net = cases.model()\n{dedent(program)}"
        texts[f"relations {name}"] = f"{program}\n{RELATIONS}"
        for kind in RATES:
            texts[f"{kind} {name}"] = f"{program}\nprint(cases.word_after_geoopt(net, {kind!r}))"
    for name, (program, _) in OTHERS.items():
        texts[f"others {name}"] = dedent(program)
    texts["files"] = (
        "cases.write_files('FOLDER/there')\nprint(*cases.words_of_files('FOLDER/here'))"
    )
    texts["files"] += "\nprint(cases.imported())"
    texts = {name: f"{SETUP}\n{text}" for name, text in texts.items()}
    for kind in RATES:
        text = f"net = cases.model()\nprint(cases.word_after_geoopt(net, {kind!r}))"
        texts[f"{kind} first"] = f"{GEOOPT_FIRST}\n{SETUP}\n{text}"
    texts["relations first"] = f"{GEOOPT_FIRST}\n{SETUP}\nnet = cases.model()\n{RELATIONS}"
    return texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of files that this process wrote, with room for others."""
    folder = tmp_path_factory.mktemp("geoopt")
    for name in ("here", "there"):
        (folder / name).mkdir()
    write_files(folder / "here")
    (folder / "manifold").write_bytes(pickle.dumps(fm.FP8Manifold("E3M4")))
    return folder


@pytest.fixture(scope="module")
def outputs(folder):
    """The lines that each program prints."""
    texts = {name: text.replace("FOLDER", str(folder)) for name, text in programs().items()}
    return {name: output.splitlines() for name, output in outputs_of(texts).items()}


@pytest.mark.parametrize("name", WITHOUT)
def test_neither_geoopt_nor_scipy_is_imported_to(outputs, name):
    assert outputs[f"without {name}"] == ["[]"]


@pytest.mark.parametrize("name", WITH)
def test_geoopt_is_imported_for(outputs, name):
    """It warns of nothing, although its own import does."""
    assert outputs[f"with {name}"] == ["[]", "['geoopt', 'scipy']"]


@pytest.mark.parametrize("name", ["first", *MADE])
def test_a_weight_and_its_classes_are_geoopts_own(outputs, name):
    assert outputs[f"relations {name}"] == ["True", "True", "True FP8", "False", "False"]


@pytest.mark.parametrize("name", ["first", *MADE])
@pytest.mark.parametrize("kind", RATES)
def test_geoopts_steps_of_a_model_are_the_same_to_the_bit(outputs, kind, name):
    """They don't depend on when geoopt was imported."""
    assert outputs[f"{kind} {name}"] == [word_after_geoopt(model(), kind)]


@pytest.mark.parametrize("kind", RATES)
def test_geoopts_steps_on_the_manifold_are_not_those_of_euclidean_space(monkeypatch, kind):
    """The words that the steps are compared by tell them apart."""
    word = word_after_geoopt(model(), kind)
    monkeypatch.setattr(fm.FP8Parameter, "manifold", geoopt.Euclidean())
    assert word_after_geoopt(model(), kind) != word


@pytest.mark.parametrize(("name", "expected"), [(k, v) for k, (_, v) in OTHERS.items()], ids=OTHERS)
def test_the_import_changes_bases_alone(outputs, name, expected):
    assert outputs[f"others {name}"] == expected


def test_files_that_were_written_before_the_import_are_read_after_it(outputs, folder):
    """And the other way round."""
    net = model()
    words = [word_of(net.parameters())] * 3 + [word_of([net[0].weight])] * 2
    assert outputs["files"] == [" ".join(words), "[]"]
    assert words_of_files(folder / "there") == words


def test_the_stand_in_has_the_methods_of_geoopts_parameters():
    public = {name for name in vars(geoopt.ManifoldTensor) if not name.startswith("_")}
    assert set(PARAMETER_METHODS) == public
