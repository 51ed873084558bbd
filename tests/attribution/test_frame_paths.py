"""What a folder is called changes no answer: rules see a frame's path from the folder it was imported from."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memprof.analysis.analysis import analyze
from memprof.attribution.rules import load_rules
from memprof.attribution.stack_index import StackIndex
from memprof.frame_paths import FramePath, frame_path, own_folders, package_names, recorded_own_folders, text_path
from memprof.snapshot import Frame, Snapshot, StackTable, load_snapshot
from memprof.snapshot.recorded_run import OwnFolder

FOLDERS = ["memprof", "trl", "torch", "transformers", "verl", "my projects", "kv_cache", "reward", "torchinductor_x"]
SITE = "lib/python3.11/site-packages"
ROOT = Path(__file__).resolve().parents[2]

ROOTED = {
    # installed
    f"/home/u/memprof/.venv/{SITE}/torch/nn/modules/module.py": "torch/nn/modules/module.py",
    f"/data/trl/venv/{SITE}/einops/einops.py": "einops/einops.py",
    f"/u/my projects/trl/.venv/{SITE}/transformers/models/torch/x.py": "transformers/models/torch/x.py",
    "/usr/lib/python3/dist-packages/torch/_tensor.py": "torch/_tensor.py",
    f"/home/torch/{SITE}/sitecustomize.py": "sitecustomize.py",
    r"C:\Users\u\venv\Lib\site-packages\torch\nn\functional.py": "torch/nn/functional.py",
    r"D:\memprof\trl env\Lib\Site-Packages\trl\trainer\grpo_trainer.py": "trl/trainer/grpo_trainer.py",
    "/b/foo.runfiles/pypi_torch/site-packages/torch/optim/adam.py": "torch/optim/adam.py",
    "/b/external/pip_torch/site-packages/torch/optim/adam.py": "torch/optim/adam.py",
    "venv/lib/python3.11/site-packages/trl/data_utils.py": "trl/data_utils.py",
    f"/x/{SITE}/memprof/integrations/callback.py": "memprof/integrations/callback.py",
    # eggs and wheels
    "/x/trl-1.16-py3.11.egg/trl/trainer/own_name.py": "trl/trainer/own_name.py",
    f"/x/torch/{SITE}/trl-1.16-py3.11.egg/trl/core.py": "trl/core.py",
    "/x/.pex/torch-2.9-cp311.whl/torch/_unheard_of.py": "torch/_unheard_of.py",
    # without site-packages: the structure tells
    "/home/u/src/trl/trl/trainer/grpo_trainer.py": "trl/trainer/grpo_trainer.py",
    "/root/torch/torch/nn/modules/module.py": "torch/nn/modules/module.py",
    "/opt/pytorch/torch/_tensor.py": "torch/_tensor.py",
    "/opt/pytorch/torch/_dynamo/eval_frame.py": "torch/_dynamo/eval_frame.py",
    "/home/transformers/trl/torch/optim/adamw.py": "torch/optim/adamw.py",
    "/mnt/select_n/lib/transformers/activations.py": "transformers/activations.py",
    "/mnt/select_n/lib/transformers/models/llama/modeling_llama.py": "transformers/models/llama/modeling_llama.py",
    "/workspace/verl/verl/workers/actor/dp_actor.py": "verl/workers/actor/dp_actor.py",
    "/x/lib.zip/torch/nn/functional.py": "torch/nn/functional.py",
    "/tmp/ray/session_1/_ray_pkg_0a/trl/trainer/grpo_trainer.py": "trl/trainer/grpo_trainer.py",
    "/b/foo.runfiles/pytorch/torch/utils/data/dataloader.py": "torch/utils/data/dataloader.py",
    "/usr/lib/python3.11/concurrent/futures/thread.py": "concurrent/futures/thread.py",
    r"C:\Python\Lib\concurrent\futures\thread.py": "concurrent/futures/thread.py",
    "/a/x/../torch/nn/init.py": "torch/nn/init.py",
    "torch/nn/init.pyc": "torch/nn/init.pyc",
    # memprof, of this version and of others, elsewhere
    "/other/memprof/memprof/record/session.py": "memprof/record/session.py",
    "/other/memprof/memprof/launch/script.py": "memprof/launch/script.py",
    "/other/clone/memprof/grpo/fused_loss.py": "memprof/grpo/fused_loss.py",
    # what TorchInductor wrote
    "/tmp/torchinductor_u/ab/cabcdef.py": "torchinductor/ab/cabcdef.py",
    f"/cache/bb/cbb{'2' * 49}.py": f"torchinductor/bb/cbb{'2' * 49}.py",
}
PROGRAMS = [
    "/home/memprof/trl/train.py",
    "/home/u/memprof/train.py",
    "/home/u/memprof/demo/train.py",
    "/home/u/memprof/integrations/my_callback.py",
    "/home/u/project/integrations/callback.py",
    "/home/u/torch/train.py",
    "/home/u/torch/distributed/ddp.py",
    "/home/u/torch/nn/train.py",
    "/home/u/transformers/models/mine.py",
    "/home/u/transformers/models/mine/train.py",
    "/home/u/trl/trainer/mine.py",
    "/home/u/trl/models/mine.py",
    "/home/u/trl/scripts/grpo.py",
    "/home/u/verl/train.py",
    "/home/u/verl/utils/mine.py",
    "/home/u/my torch/nn/modules/mine.py",
    "/home/torch nn/modules/module.py",
    "/tmp/ray/session_1/_ray_pkg_0a/trl/train.py",
    "/tmp/spark-1/userFiles-2/code.zip/trl/train.py",
    r"C:\Users\torch\memprof\train.py",
    "/home/u/torchinductor_tests/model.py",
    "/home/u/torchinductor_tests/ab/model.py",
    "/usr/lib/python3.11/copy.py",
    "train.py",
    "<string>",
    "",
    "??",
]


@pytest.mark.parametrize(("file", "seen"), ROOTED.items())
def test_a_package_is_seen_from_its_import_root(file: str, seen: str) -> None:
    assert frame_path(file) == FramePath(seen, True)
    assert text_path(f"{file}:12 forward") == FramePath(seen, True)


@pytest.mark.parametrize("file", PROGRAMS)
def test_a_program_in_a_folder_of_that_name_is_no_package(file: str) -> None:
    assert frame_path(file) == FramePath(file.replace("\\", "/"), False)


@given(st.lists(st.sampled_from(FOLDERS), max_size=5), st.sampled_from(sorted(ROOTED)))
def test_folders_above_the_import_root_never_count(folders: list[str], file: str) -> None:
    drive, _, rest = file.replace("\\", "/").rpartition(":")
    below = "/".join([*folders, rest.lstrip("/")])
    for moved in (f"/{below}", f"{drive or 'C'}:\\" + below.replace("/", "\\")):
        assert frame_path(moved).path == ROOTED[file]


@given(st.lists(st.text(st.characters(exclude_characters="/\\\0"), min_size=1), max_size=5))
def test_no_text_before_site_packages_counts(folders: list[str]) -> None:
    file = "/".join(["", *folders, "site-packages", "mine", "store.py"])
    assert frame_path(file) == FramePath("mine/store.py", True)


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_rule_sees_the_folder_of_a_program(folder: str) -> None:
    """Every rule and set of frames answers for a program below any folder as for the bare file."""
    rules = load_rules()
    functions = ["main", "call", "__init__", "forward", "step", "compute_loss"]

    def answers(prefix: str) -> list[bool]:
        frames = [Frame(f"{prefix}{file}", 1, f) for file in ("train.py", "own/nets.py") for f in functions]
        index = StackIndex(StackTable(frames, [()] + [(i,) for i in range(len(frames))]), rules)
        sets = [rules.transparent, *rules.sets.values(), *(p.frames + p.outermost for p in rules.phases)]
        found = [index.frames_matching(patterns).tolist() for patterns in sets]
        return [hit for row in [*found, *(index.holds(rule).tolist() for rule in rules.rules)] for hit in row]

    assert answers(f"/home/{folder}/") == answers("/home/u/")
    assert answers(f"C:\\{folder}\\{folder}\\") == answers("C:\\u\\")


def test_every_package_that_rules_name_has_a_structure() -> None:
    rules = load_rules()
    patterns = [*rules.transparent, *(p for s in rules.sets.values() for p in s)]
    for phase in rules.phases:
        patterns += [*phase.frames, *phase.outermost]
    for rule in rules.rules:
        patterns += [*rule.any, *rule.all, *rule.none, *rule.inner, *rule.outermost, *rule.inside]
    named = {p.partition("/")[0] for p in (pattern.partition(":")[0] for pattern in patterns) if "/" in p}
    assert {"torch", "trl", "memprof", "vllm", "torchinductor"} <= named <= package_names()


@pytest.mark.parametrize("package", ["torch", "transformers", "trl", "accelerate", "peft"])
def test_installed_modules_are_known_in_a_source_checkout_too(package: str) -> None:
    """Nearly all files of what is installed here, but for its command lines."""
    folder = Path(pytest.importorskip(package).__file__).parent
    files = [f"{package}/{f.relative_to(folder).as_posix()}" for f in folder.rglob("*.py")]
    files = [f for f in files if not re.search(r"/(?:cli|commands|scripts)/|__init__\.py$", f)]
    known = [f for f in files if frame_path(f"/src/checkout/{f}") == FramePath(f, True)]
    assert len(known) > 0.9 * len(files), sorted(set(files) - set(known))


def test_memprofs_own_files_are_known_where_it_runs() -> None:
    for folder, name in own_folders():
        for file in Path(folder).rglob("*.py"):
            below = file.relative_to(folder).as_posix()
            assert frame_path(str(file)) == FramePath(f"{name}/{below}", True)
            if below != "__init__.py":
                elsewhere = f"/x/{name}/{below}"
                assert frame_path(elsewhere) == FramePath(elsewhere[3:], True)
    assert frame_path(f"{ROOT}/tests/test_diff.py").rooted is False


def test_an_editable_memprof_elsewhere_is_known_by_what_it_recorded() -> None:
    file = "/other/clone/integrations/callback.py"
    rows = [("/other/clone/integrations/", "memprof/integrations"), ("/", "torch"), ("", "memprof")]
    own = recorded_own_folders(OwnFolder(*row) for row in rows)
    assert frame_path(file, own) == FramePath("memprof/integrations/callback.py", True)
    assert frame_path("/other/clone/train.py", own).rooted is False
    installed = f"/other/clone/integrations/.venv/{SITE}/torch/_ops.py"
    assert frame_path(installed, own) == FramePath("torch/_ops.py", True)


# ------------------------------------------------------------------------------------ real snapshots


def _moved(snapshot: Snapshot, move: Callable[[str], str]) -> Snapshot:
    table = snapshot.stacks
    return replace(snapshot, stacks=replace(table, frames=[f._replace(file=move(f.file)) for f in table.frames]))


def _below(environment: str, scripts: str) -> Callable[[str], str]:
    def move(file: str) -> str:
        for root in ("/site-packages/", "/dist-packages/"):
            if root in file:
                return environment + file.rpartition(root)[2]
        stays = file.startswith(("/usr/lib/", "/tmp/")) or not file.endswith(".py")
        return file if stays else scripts + Path(file).name

    return move


LAYOUTS = {
    "a clone called memprof": (f"/home/u/memprof/.venv/{SITE}/", "/home/u/memprof/"),
    "below trl": (f"/data/trl/venv/{SITE}/", "/data/trl/my torch/"),
    "kv_cache": (f"/kv_cache/transformers/{SITE}/", "/kv_cache/transformers/"),
    "verl without site-packages": ("/home/verl/lib with space/", "/home/verl/"),
    "Windows": ("C:\\torch\\venv\\Lib\\site-packages\\", "C:\\memprof\\"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "name",
    [
        "truth/r2_full_bf16_tied.normal", "truth/r2_full_bf16_tied.after_load", "truth/r7_nano_loop.normal",
        "snapshots/cs336-medium-train-ctx256-t211", "snapshots/select_n-llama-infer-offload-t21",
    ],
)  # fmt: skip
def test_moving_a_program_and_its_environment_changes_nothing(shared: Path, name: str, layout: str) -> None:
    path = shared / f"{name}.pickle"
    if not path.exists():
        pytest.skip(f"{name} is not here")
    snapshot = load_snapshot(path)
    move = _below(*LAYOUTS[layout])
    if "select_n" in name:  # its transformers is a copy in the program's own folder

        def move(file: str) -> str:
            return file.replace("/mnt/mcx/", LAYOUTS[layout][1])

    moved = _moved(snapshot, move)
    assert {f.file for f in moved.stacks.frames} != {f.file for f in snapshot.stacks.frames}
    one, other = analyze(snapshot), analyze(moved)
    assert other.peak.categories == one.peak.categories
    assert [(p.phase, p.categories) for p in other.phases] == [(p.phase, p.categories) for p in one.phases]
    assert other.own_peaks == one.own_peaks
