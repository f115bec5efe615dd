"""Does the suite notice when a gate is left open? Each gate is opened in a copy and tested.

A mutation is a file, the text of a gate, what takes its place, and the tests that must fail then.

Usage:
    python tests/mutate.py
    python tests/mutate.py --only files.py settings.py
"""

import importlib
import os
import shutil
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
HOSTILE, SAVED, FILES = "tests/test_hostile.py", "tests/test_saved.py", "tests/test_files.py"
LIBRARIES = (
    "gradio", "open_clip", "pyarrow.parquet", "scipy.sparse", "sentence_transformers", "timm",
    "torch", "torch_geometric.nn", "torchvision", "transformers",
)  # fmt: skip
"""Imported once, before each gate has a child."""


class Mutation(NamedTuple):
    """A gate that is opened, and the tests that must notice."""

    file: str
    gate: str
    opened: str
    tests: str
    named: str = ""


MUTATIONS = [
    Mutation("files.py", "if missing or unknown:", "if missing:", FILES),
    Mutation("files.py", "if depth > MOST_DEPTH:", "if False:", FILES),
    Mutation("files.py", "if len(content) > most_bytes:", "if False:", FILES),
    Mutation("settings.py", "if key in _CODE or kernel:", "if kernel:", HOSTILE, "name_code"),
    Mutation("settings.py", "in _CODE or kernel:", "in _CODE:", HOSTILE, "settings_of"),
    Mutation("settings.py", "(key in _ELSEWHERE and setting) or ", "", SAVED, "elsewhere"),
    Mutation("settings.py", "_SCHEME.match(value)", "False", SAVED, "elsewhere"),
    Mutation("settings.py", "path.suffix not in suffixes or ", "", HOSTILE, "files_that_towers"),
    Mutation("settings.py", " or path.name in _FETCHES", "", SAVED, "files_that_an_encoder"),
    Mutation("settings.py", "constants.HF_HUB_OFFLINE = True", "pass", SAVED, "names_of_the_hub"),
    Mutation("settings.py", "number > most:", "False:", SAVED, "larger_than_the_weights"),
    Mutation("settings.py", "factor > 64 or", "", SAVED, "larger_than_the_weights"),
    Mutation("settings.py", "or added > 1000", "", SAVED, "larger_than_the_weights"),
    Mutation("files.py", "if dtype not in rules[0].dtypes:", "if False:", FILES),
    Mutation("files.py", "or len(shape) not in axes:", "or False:", FILES),
    Mutation("files.py", "if not rules or not", "if not", FILES),
    Mutation("files.py", "if size > MOST_HEADER:", "if False:", FILES),
    Mutation("files.py", "        check_tensors(Path(path)", "        str((path)", HOSTILE,
             "number_in"),
    Mutation("files.py", "        _check_whole(content)\n", "", HOSTILE, "number_in"),
    Mutation("files.py", "or not (compressed or plain)", "", HOSTILE, "claims_more"),
    Mutation("files.py", "picture.width * picture.height > most", "False", FILES, "many_pixels"),
    Mutation("files.py", "most_memory(size) // _bytes_per_pixel(picture)", "2**26", FILES,
             "many_pixels"),
    Mutation("files.py", "_DECODER.get(picture.format, decoder)", "decoder", FILES, "largest"),
    Mutation("files.py", 'if picture.info.get("progressive") else 0', "* 0", FILES, "largest"),
    Mutation("files.py", '4 * (picture.mode != "RGB")', "0", FILES, "largest"),
    Mutation("data/folders.py", "_STRIP // picture.width", "picture.height", FILES, "largest"),
    Mutation("files.py", "            picture.load()\n", "", FILES, "damaged"),
    Mutation("files.py", "(*DAMAGE, Image.DecompressionBombError, Image.DecompressionBombWarning)",
             "OSError", FILES, "damaged"),
    Mutation("files.py", "if not isinstance(file, bytes) and Path(file).exists()", "if False",
             FILES, "no_picture"),
    Mutation("files.py", ", formats=_FORMATS)", ")", FILES, "start_a_program"),
    Mutation("files.py", "    unfinished = path.with_name(f\".{path.name}.{_MACHINE}",
             "    unfinished = path or path.with_name(f\".{path.name}.{_MACHINE}",
             "tests/codes/test_features.py", "old_file"),
    Mutation("files.py", "elif not _swap(unfinished, path):", "elif shutil.rmtree(path) is None:",
             FILES),
    Mutation("files.py", "lock.acquire(timeout=0)", "pass", FILES),
    Mutation("model.py", "if needed > most_memory(size):", "if False:", SAVED, "options_that"),
    Mutation("model.py", ", *blank.buffers())", ",)", SAVED, "larger_than_the_weights"),
    Mutation("model.py", "if layers > most:", "if False:", SAVED, "larger_than_the_weights"),
    Mutation("model.py", "nullcontext() if online else offline()", "nullcontext()", SAVED, "hub"),
    Mutation("codes/inverted.py", "self.rows.max() < len(self.ids)", "True",
             "tests/codes/test_search.py"),
    Mutation("codes/inverted.py", 'Expected(("U16",))', 'Expected(("U16", "I64"))',
             "tests/codes/test_search.py"),
    Mutation("codes/inverted.py", "and self.ids.min() >= 0", "", "tests/codes/test_search.py"),
    Mutation("codes/inverted.py", "(np.diff(self.starts) >= 0).all()", "True",
             "tests/codes/test_search.py"),
    Mutation("codes/features.py", "(starts.diff() < 0).any() or ", "",
             "tests/codes/test_features.py"),
    Mutation("codes/features.py", "z.check_format(full_check=True)", "pass",
             "tests/codes/test_features.py"),
    Mutation("data/members.py", " or info.issparse()", "", HOSTILE, "sparse_tar"),
    Mutation("data/members.py", "if info.size > most_bytes:", "if False:", HOSTILE, "too_long"),
    Mutation("data/cells.py", "if 8 * len(rows) * len(names) >", "if False and 0 >", HOSTILE,
             "other_names"),
    Mutation("data/parquet.py", "if max(taken, texts) > most:", "if False:",
             "tests/data/test_arrays.py", "more_memory"),
    Mutation("data/networks.py", "parser.StartDoctypeDeclHandler = self._doctype", "pass",
             "tests/data/test_networks.py"),
    Mutation("bulk/encode.py", "if source.holds not in reads", "if not reads",
             "tests/bulk/test_bulk.py", "no_paths"),
    Mutation("bulk/shards.py", "    z.check_format(full_check=True)\n", "",
             "tests/bulk/test_bulk.py", "fit_together"),
    Mutation("adapters/graph/data.py", "if y[0].numel() == 1 and y.max() >= len(x):", "if False:",
             HOSTILE, "graph_label"),
    Mutation("adapters/clip/data.py", "    if outside:", "    if False:", HOSTILE, "outside"),
    Mutation("adapters/clip/towers.py", "        check_no_code(folder, _SUFFIXES)\n", "", HOSTILE,
             "name_code"),
    Mutation("adapters/clip/towers.py", '("clean", "strip_sep_token")',
             '("clean", "strip_sep_token", "cache_dir")', HOSTILE, "settings_of"),
    Mutation("adapters/sentence/encoder.py", "            check_no_code(folder, SUFFIXES)\n", "",
             SAVED, "files_that_an_encoder"),
    Mutation("adapters/sentence/encoder.py", "or name not in MODULES", "", SAVED, "modules"),
    Mutation("adapters/vision/model.py", 'if options.pop("pretrained", False):', "if False:", SAVED,
             "options_that"),
    Mutation("training/run_folder.py", "if not value.isfinite().all()]", "if False]",
             "tests/training/test_fit.py", "no_numbers"),
    Mutation("training/run_folder.py", "or step < 0", "", HOSTILE, "another_step"),
    Mutation("training/run_folder.py", "else lock_folder(cfg.out)", "else nullcontext()",
             "tests/training/test_fit.py", "second_process"),
    Mutation("training/sharded.py", "del dispatch[pickle.BYTEARRAY8[0]]", "",
             "tests/training/test_sharded.py", "metadata"),
    Mutation("training/sharded.py", "        check_tensors(content)\n", "",
             "tests/training/test_sharded.py", "share_that"),
    Mutation("training/sharded.py", "if callable(self.stack[-2]):", "if False:",
             "tests/training/test_sharded.py", "metadata"),
    Mutation("app.py", "not path.is_relative_to(uploads) or ", "", "tests/test_app.py", "uploads"),
    Mutation("app.py", "allowed_hosts=allowed", 'allowed_hosts=["*"]', "tests/test_app.py",
             "uploads"),
    Mutation("app.py", "not takes_words(self.model)", "False", "tests/test_app.py", "no_paths"),
    Mutation("app.py", "app.preprocess_data = preprocess_data", "pass", "tests/test_app.py",
             "uploads"),
    Mutation("app.py", 'scope["type"] == "http" and', "False and", "tests/test_app.py",
             "uploads"),
    Mutation("app.py", "max_file_size=MOST_UPLOAD,", "", "tests/test_app.py", "uploads"),
    Mutation("app.py", "html.escape(item.text)", "item.text", "tests/test_app.py", "escaped"),
]  # fmt: skip


@dataclass(frozen=True)
class Config:
    """Open one gate after another; fail if the suite does not notice."""

    only: tuple[str, ...] = ("",)
    """Only the gates of files that end in one of these."""


def opened(mutation: Mutation) -> str:
    """The file with its gate open."""
    text = (ROOT / "ncl_multi" / mutation.file).read_text()
    if text.count(mutation.gate) != 1:
        raise ValueError(f"{mutation.file} must contain {mutation.gate!r} once")
    return text.replace(mutation.gate, mutation.opened)


def failed_test(folder: str, tests: str, named: str) -> str:
    """The first test that fails in the folder, in a child that has the libraries already."""
    log = Path(folder, "log.txt")
    child = os.fork()
    if child == 0:
        code = 99
        try:
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1), os.dup2(out, 2)
            os.chdir(folder)
            os.environ["PYTHONPATH"] = f"{folder}:{folder}/tests"
            sys.path[:0] = [folder]
            quiet = ["-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
            code = pytest.main(["-n", "0", "-x", *quiet, tests, "-k", named])
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    said = log.read_text()
    failed = [line for line in said.splitlines() if line.startswith("FAILED")]
    if code != bool(failed):
        raise ValueError(f"{tests} -k '{named}' ended with {code}: {said[-2000:]}")
    return failed[0].split("::")[1].split(" ")[0].split("[")[0] if failed else "NOBODY"


def main(cfg: Config) -> None:
    for name in LIBRARIES:
        importlib.import_module(name)
    missed = 0
    print("| file | gate | noticed by |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name in ("ncl_multi", "tests", "recipes", "evals"):
            shutil.copytree(ROOT / name, Path(folder, name))
        shutil.copy(ROOT / "pyproject.toml", folder)
        mutations = [mutation for mutation in MUTATIONS if mutation.file.endswith(cfg.only)]
        # A test that fails with every gate closed notices nothing.
        for tests in sorted({mutation.tests for mutation in mutations}):
            named = [mutation.named for mutation in mutations if mutation.tests == tests]
            test = failed_test(folder, tests, " or ".join(named) if all(named) else "")
            if test != "NOBODY":
                raise ValueError(f"{test} fails before a gate is opened")
        for mutation in mutations:
            path = Path(folder, "ncl_multi", mutation.file)
            whole = path.read_text()
            path.write_text(opened(mutation))
            test = failed_test(folder, mutation.tests, mutation.named)
            path.write_text(whole)
            missed += test == "NOBODY"
            print(f"| {mutation.file} | `{mutation.gate.strip()}` | {test} |", flush=True)
    sys.exit(missed > 0)


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Config))
