"""Files that are damaged, incomplete or of another kind, with the command that reads them.

Each kind is wrong by construction; `strict = False` marks those that chance may leave readable (single flipped bytes).
"""

from __future__ import annotations

import json
import pickle
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st


@dataclass(frozen=True)
class Draw:
    """What chance decides of a case."""

    rubbish: bytes
    place: float  # in [0, 1): where in a file
    seed: int


@dataclass(frozen=True)
class Material:
    """What a case is made of: its folder, a sound policy, a sound run, and chance."""

    here: Path
    policy: Path
    run_dir: Path
    draw: Draw


@dataclass(frozen=True)
class Case:
    """A command line, what its message must name, whether it must be refused."""

    arguments: list[str]
    names: str
    strict: bool = True


Maker = Callable[[Material], Case]
ROWS = [{"prompt": f"what is {n} + {n}?", "answer": str(2 * n), "source": "exact"} for n in range(8)]
_READ = ["--set", "task.columns.answer=answer", "--set", "task.columns.data_source=source"]


def files() -> st.SearchStrategy[tuple[str, Draw]]:
    """Any kind of malformed file, and what chance decides of it."""
    draws = st.builds(
        Draw, st.binary(min_size=1, max_size=64), st.floats(0, 1, exclude_max=True), st.integers(0, 2**32 - 1)
    )
    return st.tuples(st.sampled_from(sorted(KINDS)), draws)


# -- data sets ---------------------------------------------------------------------------------------------------------


def _dataset(material: Material, name: str, strict: bool = True) -> Case:
    arguments = ["run", "--quiet", "--model", str(material.policy), "--task", "dataset", "--set", f"task.path={name}"]
    return Case([*arguments, *_READ], name, strict)


def _parquet(material: Material, columns: dict[str, Any]) -> Case:
    pq.write_table(pa.table(columns), material.here / "data.parquet")
    return _dataset(material, "data.parquet")


def _columns() -> dict[str, list[Any]]:
    return {name: [row[name] for row in ROWS] for name in ROWS[0]}


def _column_missing(material: Material) -> Case:
    columns = _columns()
    del columns[random.Random(material.draw.seed).choice(sorted(columns))]
    return _parquet(material, columns)


def _column_renamed(material: Material) -> Case:
    columns = _columns()
    name = random.Random(material.draw.seed).choice(sorted(columns))
    columns[f"{name}s"] = columns.pop(name)
    return _parquet(material, columns)


def _column_mistyped(material: Material) -> Case:
    chooser = random.Random(material.draw.seed)
    columns: dict[str, Any] = _columns()
    other = [[1] * 8, [1.5] * 8, [True] * 8, [None] * 8, [{"a": 1}] * 8, [[1]] * 8, [b"x"] * 8, [""] * 8]
    if chooser.random() < 0.5:
        columns["prompt"] = chooser.choice(other)
    else:
        columns["source"] = chooser.choice(other)
    return _parquet(material, columns)


def _answers_mistyped(material: Material) -> Case:
    other = [[None] * 8, [{"a": 1}] * 8, [True] * 8, [b"x"] * 8, [""] * 8, [float("nan")] * 8, [[]] * 8]
    return _parquet(material, {**_columns(), "answer": random.Random(material.draw.seed).choice(other)})


def _parquet_empty(material: Material) -> Case:
    return _parquet(material, {name: pa.array([], pa.string()) for name in ROWS[0]})


def _parquet_cut(material: Material) -> Case:
    case = _parquet(material, _columns())
    path = material.here / "data.parquet"
    content = path.read_bytes()
    path.write_bytes(content[: int(material.draw.place * len(content))])
    return case


def _parquet_flipped(material: Material) -> Case:
    _parquet(material, _columns())
    _flip(material.here / "data.parquet", material.draw)
    return _dataset(material, "data.parquet", strict=False)


def _rubbish(name: str, material: Material) -> Case:
    (material.here / name).write_bytes(material.draw.rubbish)
    return _dataset(material, name)


def _json_lines(material: Material, broken: bytes | str) -> Case:
    lines: list[bytes] = [json.dumps(row).encode() for row in ROWS]
    lines.insert(int(material.draw.place * 9), broken.encode() if isinstance(broken, str) else broken)
    (material.here / "data.jsonl").write_bytes(b"\n".join(lines))
    return _dataset(material, "data.jsonl")


def _broken_line(material: Material) -> Case:
    broken = (
        '{"prompt": ',
        "[1, 2]",
        "7",
        '"text"',
        "{'prompt': 1}",
        b"\xff\xfe{}",
        "[" * 3000,
        '{"prompt": 1}',
        "{}",
        "nul",
    )
    return _json_lines(material, random.Random(material.draw.seed).choice(broken))


def _empty_data(name: str, material: Material) -> Case:
    (material.here / name).touch()
    return _dataset(material, name)


def _long_prompt(material: Material) -> Case:
    row = {**ROWS[0], "prompt": "a b " * 40_000}
    return replace(_json_lines(material, json.dumps(row)), names="context")


def _no_such_scorer(material: Material) -> Case:
    return _json_lines(material, json.dumps({**ROWS[0], "source": material.draw.rubbish.hex()}))


def _folder_without_data(material: Material) -> Case:
    (material.here / "data").mkdir()
    (material.here / "data" / "notes.txt").write_bytes(material.draw.rubbish)
    return _dataset(material, "data")


# -- models and tokenizers ---------------------------------------------------------------------------------------------


def _model(material: Material, change: Callable[[Path, Draw], str], strict: bool = True) -> Case:
    folder = material.here / "model"
    shutil.copytree(material.policy, folder)
    names = change(folder, material.draw)
    return Case(["run", "--quiet", "--model", "./model", "--task", f"{_TASK}:vowels"], names or "model", strict)


_TASK = "tests.faults.setting"


def _no_weights(folder: Path, draw: Draw) -> str:
    (folder / "model.safetensors").unlink()
    return "no weights"


def _pickle(folder: Path, draw: Draw) -> str:
    (folder / "model.safetensors").unlink()
    name = random.Random(draw.seed).choice(("pytorch_model.bin", "model.pt", "model.ckpt"))
    (folder / name).write_bytes(pickle.dumps({"weight": [1.0]}))
    return "pickle"


def _pickle_named_safetensors(folder: Path, draw: Draw) -> str:
    (folder / "model.safetensors").write_bytes(pickle.dumps({"weight": [1.0]}))
    return ""


def _weights_cut(folder: Path, draw: Draw) -> str:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(draw.place * len(content))])
    return ""


def _tensor_missing(folder: Path, draw: Draw) -> str:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors[random.Random(draw.seed).choice(sorted(tensors))]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return "no weights for"


def _tensor_of_another_shape(folder: Path, draw: Draw) -> str:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    name = random.Random(draw.seed).choice(sorted(tensors))
    tensors[name] = tensors[name].repeat(*[2] * tensors[name].ndim)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return ""


def _json_file(name: str, folder: Path, draw: Draw) -> str:
    content = (folder / name).read_bytes()
    broken = (
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        content[: int(draw.place * (len(content) - 2))],
        draw.rubbish + b"{",
    )
    (folder / name).write_bytes(random.Random(draw.seed).choice(broken))
    return ""


def _unknown_architecture(folder: Path, draw: Draw) -> str:
    return _change_json(folder / "config.json", {"model_type": "no_such_model", "architectures": ["NoSuchModel"]})


def _no_file(name: str, folder: Path, draw: Draw) -> str:
    (folder / name).unlink()
    return ""


def _no_end_of_text(folder: Path, draw: Draw) -> str:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).exists():
            _change_json(folder / name, {"eos_token": None})
    return "end-of-text"


def _small_vocabulary(folder: Path, draw: Draw) -> str:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors = {name: value[:40].clone() if "embed_tokens" in name else value for name, value in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _change_json(folder / "config.json", {"vocab_size": 40})
    return "tokens"


def _change_json(path: Path, changes: dict[str, Any]) -> str:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return ""


# -- run folders -------------------------------------------------------------------------------------------------------

_READERS = (
    ["show", "run"],
    ["tokens", "run", "--step", "2"],
    ["spikes", "run"],
    ["compare", "run", "run"],
    ["eval", "run"],
)


def _run_file(name: str, material: Material) -> Case:
    """run.json or config.yaml that cannot be read, with a command that needs it."""
    shutil.copytree(material.run_dir, material.here / "run")
    path = material.here / "run" / name
    chooser = random.Random(material.draw.seed)
    content = path.read_bytes()
    half = content[: int((0.05 + 0.9 * material.draw.place) * len(content))]
    if name == "run.json":
        path.write_bytes(chooser.choice((b"", b"{", b"[]", b"null", b"\xff", half, b'{"schema_version": 99}', b"{}")))
        readers = [reader for reader in _READERS if reader[0] != "eval"]
        return Case(list(chooser.choice(readers)), "run")
    path.write_bytes(chooser.choice((b"steps: [", b"[]", b"stepz: 3", b"\xff", b"steps: -1", half + b"\n  - {")))
    return Case(list(chooser.choice((["eval", "run"], ["run", "--resume", "run"]))), "")


def _no_run_file(name: str, material: Material) -> Case:
    shutil.copytree(material.run_dir, material.here / "run")
    (material.here / "run" / name).unlink()
    return Case(["show", "run"] if name == "run.json" else ["run", "--resume", "run"], name)


def _run_json_of_other_types(material: Material) -> Case:
    shutil.copytree(material.run_dir, material.here / "run")
    chooser = random.Random(material.draw.seed)
    path = material.here / "run" / "run.json"
    info = json.loads(path.read_text())
    for key in chooser.sample(sorted(set(info) - {"schema_version"}), 3):
        info[key] = chooser.choice((None, 5, "x", [], {}, [{}], {"a": None}))
    path.write_text(json.dumps(info))
    return Case(list(chooser.choice(_READERS)), "", strict=False)


def _no_tokenizer(material: Material) -> Case:
    shutil.copytree(material.run_dir, material.here / "run")
    shutil.rmtree(material.here / "run" / "tokenizer")
    return Case(["tokens", "run", "--step", "2"], "tokenizer")


def _no_checkpoint(material: Material) -> Case:
    shutil.copytree(material.run_dir, material.here / "run")
    shutil.rmtree(material.here / "run" / "checkpoints")
    return Case(["eval", "run"], "checkpoint")


# -- other files -------------------------------------------------------------------------------------------------------


def _probe_data(material: Material) -> Case:
    chooser = random.Random(material.draw.seed)
    good = json.dumps({"prompt": "a", "completion": "b"})
    broken = chooser.choice(
        ('{"prompt": ', "[]", '{"prompt": "a"}', '{"completion": "a"}', '{"prompt": 1, "completion": 2}', "")
    )
    text = "" if not broken else f"{good}\n{broken}\n{good}\n"
    (material.here / "texts.jsonl").write_text(text)
    return Case(
        ["probe", "--model", str(material.policy), "--data", "texts.jsonl", "--probes", "perturbation"], "texts.jsonl"
    )


def _probe_set(material: Material) -> Case:
    content = material.draw.rubbish
    if material.draw.seed % 2:
        whole = (material.run_dir / "probe_set.parquet").read_bytes()
        content = whole[: int(material.draw.place * len(whole))]
    (material.here / "set.parquet").write_bytes(content)
    options = ["--set", "probes.probe_set=set.parquet", "--set", "probes.every=1"]
    return Case(
        ["run", "--quiet", "--model", str(material.policy), "--task", f"{_TASK}:vowels", *options], "set.parquet"
    )


def _sweep(material: Material) -> Case:
    broken = (
        b"methods: [grop]\n",
        b"seeds: [a]\n",
        b"settings: 5\n",
        b"grid: {no.such.field: [1]}\n",
        b"methods: [\n",
        b"stepz: 1\n",
        b"\xff\xfe",
        b"- a\n",
        b"methods: []\n",
        b"base: {steps: -1}\nmethods: [grpo]\n",
        material.draw.rubbish + b": [",
    )
    (material.here / "sweep.yaml").write_bytes(random.Random(material.draw.seed).choice(broken))
    return Case(["sweep", "sweep.yaml"], "")


def _flip(path: Path, draw: Draw) -> None:
    content = bytearray(path.read_bytes())
    content[int(draw.place * len(content))] ^= 1 + draw.seed % 255
    path.write_bytes(content)


KINDS: dict[str, Maker] = {
    "Parquet: a column missing": _column_missing,
    "Parquet: a column renamed": _column_renamed,
    "Parquet: prompts or sources of another type": _column_mistyped,
    "Parquet: answers of another type": _answers_mistyped,
    "Parquet: no row": _parquet_empty,
    "Parquet: cut off": _parquet_cut,
    "Parquet: a byte flipped": _parquet_flipped,
    "Parquet: rubbish": partial(_rubbish, "data.parquet"),
    "JSONL: a broken line": _broken_line,
    "JSONL: rubbish": partial(_rubbish, "data.jsonl"),
    "JSONL: empty": partial(_empty_data, "data.jsonl"),
    "JSONL: unknown data source": _no_such_scorer,
    "a prompt longer than the context": _long_prompt,
    "a data file of an unknown kind": partial(_rubbish, "data.csv"),
    "a folder without data": _folder_without_data,
    "model: no weights": lambda m: _model(m, _no_weights),
    "model: a pickle": lambda m: _model(m, _pickle),
    "model: a pickle named safetensors": lambda m: _model(m, _pickle_named_safetensors),
    "model: weights cut off": lambda m: _model(m, _weights_cut),
    "model: a tensor missing": lambda m: _model(m, _tensor_missing),
    "model: a tensor of another shape": lambda m: _model(m, _tensor_of_another_shape),
    "model: config.json broken": lambda m: _model(m, partial(_json_file, "config.json")),
    "model: config.json missing": lambda m: _model(m, partial(_no_file, "config.json")),
    "model: unknown architecture": lambda m: _model(m, _unknown_architecture),
    "model: fewer words than the tokenizer": lambda m: _model(m, _small_vocabulary),
    "tokenizer: broken": lambda m: _model(m, partial(_json_file, "tokenizer.json")),
    "tokenizer: missing": lambda m: _model(m, partial(_no_file, "tokenizer.json")),
    "tokenizer: its settings broken": lambda m: _model(m, partial(_json_file, "tokenizer_config.json"), strict=False),
    "tokenizer: no end of text": lambda m: _model(m, _no_end_of_text),
    "run: run.json broken": partial(_run_file, "run.json"),
    "run: run.json missing": partial(_no_run_file, "run.json"),
    "run: run.json with values of other types": _run_json_of_other_types,
    "run: config.yaml broken": partial(_run_file, "config.yaml"),
    "run: config.yaml missing": partial(_no_run_file, "config.yaml"),
    "run: no tokenizer": _no_tokenizer,
    "run: no checkpoint": _no_checkpoint,
    "probe: data broken": _probe_data,
    "probe set: broken": _probe_set,
    "sweep: broken": _sweep,
}
"""Every kind of malformed file and what makes one."""
