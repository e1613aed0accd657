"""What a published folder is, in words and numbers: they travel with a model's settings, and say how it is written."""

import json
from pathlib import Path
from typing import Any, Final

from fp8manifold._published.found import quantization_of, stored_weights
from fp8manifold._published.naming import places_of
from fp8manifold._published.places import Place
from fp8manifold._published.stored import Header

CONFIG: Final = "config.json"
GENERATION: Final = "generation_config.json"
OF_SERVER: Final = "hf_quant_config.json"
DOCUMENTS: Final = (CONFIG, GENERATION, OF_SERVER)
INDEX: Final = "model.safetensors.index.json"


def described(place: Path, tensors: Any) -> dict[str, Any]:
    """The description of a folder.

    Args:
        place: the folder.
        tensors: of its files: their ``names()``, and by name the ``header`` and the ``metadata`` of its file.

    Raises:
        FileNotFoundError: there are no settings.
    """
    files: dict[str, Any] = {}
    for name in tensors.names():
        header = tensors.header(name)
        said = files.setdefault(header.file, {"metadata": tensors.metadata(name), "tensors": {}})
        said["tensors"][name] = [header.dtype, list(header.shape)]
    documents = {name: (place / name).read_text("utf-8") for name in DOCUMENTS if (place / name).is_file()}
    if CONFIG not in documents:
        raise FileNotFoundError(f"{str(place)!r} has no {CONFIG}: give the folder of a model of transformers")
    known = {*files, *DOCUMENTS, INDEX}
    others = sorted(each.name for each in place.iterdir() if each.is_file() and each.name not in known)
    made = {"source": str(place), "files": files, "documents": documents, "kept": {}, "others": others}
    if (place / INDEX).is_file():
        made["index"] = json.loads((place / INDEX).read_text("utf-8")).get("metadata", {})
    return made


class Layout:
    """What the tensors of a folder are, by its description and, once it is found in a model, where that has them."""

    def __init__(self, published: dict[str, Any]) -> None:
        self.published = published
        for name in (*published["files"], *published["documents"], *published["others"]):
            if Path(name).name != name:  # settings come from anywhere, and say where is written
                raise ValueError(f"the model's settings name {name!r} among its files, which is no name of a file")
        self.headers = {
            name: Header(dtype, tuple(shape), file)
            for file, said in published["files"].items()
            for name, (dtype, shape) in said["tensors"].items()
        }
        config, of_server = (json.loads(published["documents"].get(name, "null")) for name in (CONFIG, OF_SERVER))
        self.stored = stored_weights(self.headers, quantization_of(config, of_server))
        self.weight_of = {name: each for each in self.stored.values() for name in (each.codes, each.scale)}
        self.extras = {name for each in self.stored.values() for name in each.extras}
        self.floats = [name for name in self.headers if name not in self.weight_of and name not in self.extras]
        self.places: dict[str, Place] = {}

    def find(self, model: Any) -> None:
        """Look for every tensor in a model."""
        shapes = {name: self.headers[name].shape for name in self.floats}
        self.places = places_of(model, shapes | {name: each.shape for name, each in self.stored.items()})

    @property
    def left(self) -> list[str]:
        """Tensors of floats, codes and scales that the model has no place for."""
        names = {name: each.name for name, each in self.weight_of.items()} | {name: name for name in self.floats}
        return [name for name, own in names.items() if own not in self.places]
