"""What --redact takes out, and what it must leave in."""

from __future__ import annotations

import copy
import getpass
import json
import pickle
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memprof.analysis.report_files import validate
from memprof.frame_paths import short_path
from memprof.redact import HIDDEN, redact, redact_snapshot, redact_text
from tests.reports.sample import sample
from tests.reports.typed import build_document


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("/home/ada/venv/lib/python3.11/site-packages/trl/trainer/x.py:12 f", "trl/trainer/x.py:12 f"),
        ("/home/ada/train.py:31 main", "…/train.py:31 main"),
        ("~/work/train.py:31 main", "…/train.py:31 main"),
        ("from /home/ada/x.py to /data/ada/y.py", "from …/x.py to …/y.py"),
        ("venv/lib/python3.11/site-packages/trl/x.py:1 f", "trl/x.py:1 f"),
        ("/usr/lib/python3.11/threading.py:1 run", "python3.11/threading.py:1 run"),
        ("C:\\Users\\Ada Lovelace\\proj\\train.py:3 main", "…/train.py:3 main"),
        ("at::native::add (/build/ada/aten/x.cpp:1)", "at::native::add (…/x.cpp:1)"),
        ("/data/ada/models/Qwen2.5-7B", "…/Qwen2.5-7B"),
        ("ada@example.org", HIDDEN),
        ("see https://wandb.example.com/ada/run now", f"see https://{HIDDEN} now"),
        ("10.1.2.3:29500", HIDDEN),
        ("/home/ada99 is outside /home/ada99/runs", f"…/{HIDDEN} is outside …/runs"),
        ("password: hunter2x9", f"password: {HIDDEN}"),
        ("--passphrase 'two words' --lr 1", f"--passphrase '{HIDDEN}' --lr 1"),
        ('{"password": "two words", "lr": 1}', f'{{"password": "{HIDDEN}", "lr": 1}}'),
        ("more='--password hunter2 --lr 1'", f"more='--password {HIDDEN} --lr 1'"),
        ("pwd: hunter2", f"pwd: {HIDDEN}"),
        ("wandb_api_key: abcd1234", f"wandb_api_key: {HIDDEN}"),
        ("Authorization: Basic YWRhOnNlY3JldA==", f"Authorization: Basic {HIDDEN}"),
        ("hostname: gpu-17, SLURMD_NODENAME=nid77", f"hostname: {HIDDEN}, SLURMD_NODENAME={HIDDEN}"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIEvg==\n-----END", f"{HIDDEN}-----END"),
    ],
)
def test_who_and_where_go(text: str, left: str) -> None:
    assert redact_text(text) == left


@pytest.mark.parametrize(
    ("path", "short"),
    [
        ("/home/ann/env/lib/python3.11/site-packages/trl/trainer.py", "trl/trainer.py"),
        ("C:\\Users\\ann\\Lib\\site-packages\\trl\\t.py", "trl/t.py"),
        ("/usr/lib/python3.11/threading.py", "python3.11/threading.py"),
        ("/home/ann/env/lib/python3.11/site-packages/six.py", "six.py"),
        ("/home/ann/secret-project/train.py", "train.py"),
        ("secret project/train.py", "train.py"),
        ("C:\\work\\train.py", "train.py"),
        ("<string>", "<string>"),
        ("", ""),
    ],
)
def test_short_paths_are_the_same_in_files_and_in_text(path: str, short: str) -> None:
    assert short_path(path) == short
    assert redact_text(path) in (short, f"…/{short}", path)
    if path.startswith("/"):
        assert redact_text(f"in {path}:3 f") in (f"in {short}:3 f", f"in …/{short}:3 f")


def test_a_snapshot_is_cleaned_where_it_holds_paths_and_words() -> None:
    shared = [{"filename": "/home/ada/train.py", "line": 3, "name": "main"}]
    other = [shared[0], {"filename": "/usr/lib/python3.11/threading.py", "line": 1, "name": "run"}]
    raw = {
        "segments": [{"frames": shared, "blocks": [{"frames": other, "size": 512}, {"size": 1024}]}],
        "device_traces": [[{"action": "alloc", "frames": shared, "size": 512}, {"action": "free", "size": 512}]],
        "memprof": {
            "config": {"lr": 0.1, "hub_token": "abc", "data": "/data/ada/gsm8k"},
            "notes": ["failed at /home/ada/hook.py"],
            "oom": {"requested_bytes": 8, "stack": ["/home/ada/train.py:3 main"]},
            "owners": [["model.layers.0", 4096]],
        },
    }
    redact_snapshot(raw)
    assert "ada" not in json.dumps(raw)
    assert [f["filename"] for f in other] == ["train.py", "python3.11/threading.py"]
    assert raw["segments"][0]["blocks"][1] == {"size": 1024}
    assert raw["memprof"] == {
        "config": {"lr": 0.1, "hub_token": HIDDEN, "data": "…/gsm8k"},
        "notes": ["failed at …/hook.py"],
        "oom": {"requested_bytes": 8, "stack": ["…/train.py:3 main"]},
        "owners": [["model.layers.0", 4096]],
        "redacted": True,
    }
    before = copy.deepcopy(raw)
    redact_snapshot(raw)
    assert raw == before
    redact_snapshot({})


@pytest.mark.parametrize(
    "secret",
    [
        "hf_" + "a1B2" * 8,
        "sk-proj-" + "x" * 24,
        "ya29.a0AfH6SMBxyz1234567890",
        "npm_" + "a1B2" * 9,
        "dckr_pat_abcdefghijk1234567",
        "ghp_" + "A1" * 18,
        "AKIA" + "A" * 16,
        "0123456789abcdef" * 2 + "01234567",
    ],
)
def test_tokens_go_wherever_they_stand(secret: str) -> None:
    assert secret not in redact_text(f"--token={secret} x")


@pytest.mark.parametrize(
    "text",
    [
        "model.layers.3.mlp.up_proj.weight",
        "meta-llama/Llama-3.1-8B-Instruct",
        "<string>:1 f",
        "torch 2.13.0+cpu",
        "8×128 bfloat16",
        "step-000002.rank-0.pickle",
        "rule trl.chunked_logprob matched its stack",
        "2 / 3 of it, and/or more",
        "eos_token: </s>, pad_token: <pad>",
        "host: 3.00 GiB of 24.00 GiB; user: temporaries; 512 tokens: 3 MiB",
    ],
)
def test_what_a_report_is_for_stays(text: str) -> None:
    assert redact_text(text) == text


def test_private_settings_are_hidden_by_their_name() -> None:
    config = {
        "hub_token": "abc",
        "WANDB_API_KEY": "abc",
        "hostname": "node17",
        "user": "x",
        "command_line": "python train.py",
        "run_argv": ["python", "train.py"],
    }
    assert set(redact(config).values()) == {HIDDEN}


def test_settings_about_text_tokens_stay() -> None:
    config = {"eos_token": "<|im_end|>", "pad_token_id": 7, "max_tokens": 5, "num_tokens": "12", "push_to_hub": False}
    assert redact(config) == config


def test_this_machine_is_not_named() -> None:
    host, user = socket.gethostname(), getpass.getuser()
    shown = redact_text(f"note from {host}, run by {user}")
    if len(host) > 2 and host != "localhost":
        assert host not in shown
    assert user not in shown or len(user) <= 2 or user in ("root", "runner", "user", "ubuntu")


def test_a_redacted_report_is_a_report_with_the_same_figures() -> None:
    report, series = sample()
    before = copy.deepcopy(report)
    shared = redact(report)
    validate(shared)
    assert report == before
    assert "/home/ada" in json.dumps(report)
    assert "/home" not in json.dumps(shared)
    assert "ada/" not in json.dumps(shared)
    assert shared["source"]["files"] == ["step-000002.rank-0.pickle"]
    for key in ("categories", "groups", "evidence", "allocated_bytes"):
        assert shared["peak"][key] == report["peak"][key]
    one, other = build_document(report, series), build_document(shared, series)
    assert one.summary.peak_bytes == other.summary.peak_bytes
    assert [r.at_peak for r in one.rows] == [r.at_peak for r in other.rows]


@pytest.mark.parametrize(
    "text", ["/" + "a/" * 20_000, "/" + "a b" * 20_000, "a b " * 20_000 + "/", "x" * 99_999 + "@", "1." * 50_000]
)
def test_no_text_takes_long(text: str) -> None:
    start = time.process_time()
    redact_text(text)
    assert time.process_time() - start < 2


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_any_plain_data_passes_and_twice_is_once(data: object) -> None:
    once = redact(data)
    assert redact(once) == once


# ---- planted secrets -------------------------------------------------------------------------------------------------

# What must not be left, and a text that carries it: a machine and a user that are not those of this process.
PLANTED = {
    "gpunode1742": "rank 0 ran on gpunode1742",
    "cluster.internal": "connected to gpunode1742.cluster.internal",
    "adalovelace": "started by adalovelace",
    "/home/adalovelace": "/home/adalovelace/private/train.py:7 main",
    "/data/secretlab": "read /data/secretlab/ckpt/model.safetensors",
    "\\\\fileserver": r"copied \\fileserver\share\run.pickle",
    "AdaPC": r"at C:\Users\AdaPC\work\train.py:3",
    "hf_abcdefghij0123456789": "logged in with hf_abcdefghij0123456789",
    "sk-proj-abcdefghijklmnop": "key sk-proj-abcdefghijklmnop",
    "ghp_ABCDEFGHIJ0123456789abcd": "cloned with ghp_ABCDEFGHIJ0123456789abcd",
    "AKIAABCDEFGHIJKLMNOP": "aws AKIAABCDEFGHIJKLMNOP",
    "AIzaSyA1234567890abcdefghijklmnopqrstuv": "AIzaSyA1234567890abcdefghijklmnopqrstuv",
    "xoxb-123456789012-abcdef": "slack xoxb-123456789012-abcdef",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIi": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3.SflKxwRJSMeKKF2QT4",
    "0123456789abcdef0123456789abcdef01234567": "wandb 0123456789abcdef0123456789abcdef01234567",
    "bearerwords42": "Authorization: Bearer bearerwords42",
    "hunter2hunter2": "run as DB_PASSWORD=hunter2hunter2 python train.py",
    "openSesame99": "python train.py --api-key openSesame99 --lr 1e-5",
    "quotedSecret77": "{'env': {'HF_TOKEN': 'quotedSecret77'}}",
    "ada@example.org": "mail ada@example.org",
    "ada@loginhost": "scp ada@loginhost:run.pickle",
    "10.11.12.13": "at 10.11.12.13:29500",
    "fe80::1ff:fe23": "on fe80::1ff:fe23:4567:890a",
    "bucket-of-ada": "wrote s3://bucket-of-ada/run",
    "plainWord55": "the word is plainWord55",
    "environWord66": "got environWord66",
}  # fmt: skip


def planted() -> dict[str, Any]:
    """A snapshot that carries every text in each of its fields of words, and names some by the fields' own names."""
    from benchmarks.faults.inputs import snapshot

    raw, words = snapshot(), " | ".join(PLANTED.values())
    own = raw["memprof"]
    for holder in (*raw["device_traces"][0], *raw["segments"], *(b for s in raw["segments"] for b in s["blocks"])):
        holder["frames"] = [{"filename": "/home/adalovelace/private/train.py", "line": 7, "name": "main"}]
        holder["user_metadata"] = holder.get("user_metadata") or words
    raw["external_annotations"] = [{"name": words, "device": 0, "stage": "START", "time_us": 1}]
    own["node"] = "gpunode1742.cluster.internal"
    own["config"] |= {f"note_{n}": text for n, text in enumerate(PLANTED.values())}
    own["config"] |= {
        "username": "adalovelace", "hub_token": "plainWord55", "run_name": words, "command_line": words,
        "model_name_or_path": "/home/adalovelace/models/Qwen", "environment": {"SOME_VARIABLE": "environWord66"},
    }  # fmt: skip
    own["config"]["note_environment"] = "environment=environWord66"
    own["setup"]["model_config"]["_name_or_path"] = "/data/secretlab/models/Qwen"
    own["setup"]["note"] = words
    own["notes"] = [words, *PLANTED.values()]
    own["oom"]["stack"] = ["/home/adalovelace/private/train.py:7 main", words]
    own["survived"][0]["note"] = words
    own["versions"]["local"] = words
    for row in own["owners"]:
        row[4] = words
    for row in own["holders"]:
        row[2] = words
    for part in ("versions", "device", "devices", "phases", "setup", "outside"):
        _add_to_every_text(own[part], words)
    tag = f"memprof:phase={own['phases'][1]['phase']};step=2;region=forward"
    raw["device_traces"][0][-2]["user_metadata"] = tag.replace("step=2", words)
    return raw


def _add_to_every_text(value: Any, words: str) -> None:
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(inner, str) and key not in ("type", "model_type"):
            value[key] = f"{inner} {words}"
        elif isinstance(inner, (dict, list)):
            _add_to_every_text(inner, words)


def left_in(text: str) -> list[str]:
    return [secret for secret in PLANTED if secret in text or json.dumps(secret)[1:-1] in text]


COMMANDS = [
    ["report", "{run}"], ["report", "{run}", "--format", "markdown"], ["report", "{run}", "--json", "-"],
    ["report", "{run}", "-o", "{out}/page.html"], ["report", "{run}", "--allocations", "all", "--json", "-"],
    ["report", "{json}"], ["report", "{json}", "--format", "markdown"], ["report", "{json}", "--json", "-"],
    ["report", "{json}", "-o", "{out}/page.html"], ["report", "{run}", "{second}", "-o", "{out}/page.html"],
    ["explain", "{run}", "--full-stacks"], ["explain", "{run}", "--format", "markdown"],
    ["explain", "{run}", "--all", "--json", "-"], ["compare", "{run}", "{json}"],
    ["compare", "{run}", "{json}", "--format", "markdown"], ["compare", "{run}", "{json}", "--json", "-"],
    ["compare", "{run}", "{json}", "-o", "{out}/page.html"], ["compare", "{pair}", "--json", "-"],
    ["report", "{ranks}"], ["report", "{ranks}", "--json", "-"], ["report", "{ranks}", "-o", "{out}/page.html"],
    ["report", "{ranks}", "--advise", "--gpu", "24GB"], ["explain", "{run}", "--at", "phase:forward"],
    ["advise", "{run}", "--estimate", "--json", "-"], ["advise", "{json}", "--estimate"],
    ["oom", "{log}"], ["oom", "{log}", "--format", "markdown"], ["oom", "{log}", "--json", "-"],
]  # fmt: skip


@pytest.fixture(scope="module")
def carriers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files that carry the secrets: a snapshot, its report, a comparison, another rank and a log."""
    from benchmarks.faults.inputs import counters
    from tests.cli.test_cli import call
    from tests.oom.wordings import WORDINGS

    folder = tmp_path_factory.mktemp("planted")
    names = {"run": "run.pickle", "second": "second.pickle", "json": "r.json", "pair": "pair.json", "log": "train.log"}
    files = {name: folder / file for name, file in names.items()} | {"out": folder}
    raw = planted()
    files["run"].write_bytes(pickle.dumps(raw, protocol=4))
    raw["memprof"]["rank"] = 1
    files["second"].write_bytes(pickle.dumps(raw, protocol=4))
    assert call("report", str(files["run"]), "--json", str(files["json"])).exit_code == 0
    assert call("compare", str(files["run"]), str(files["json"]), "--json", str(files["pair"])).exit_code == 0
    (place := folder / "ranks of adalovelace" / "_memprof").mkdir(parents=True)
    for rank, name in enumerate(("run", "second")):
        shutil.copy(files[name], place / f"step-000001.rank-{rank}.pickle")
    about = [{**row, "model": " ".join(PLANTED.values()), "node": "gpunode1742"} for row in counters()]
    (place / "counters.rank-0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in about), encoding="utf-8")
    files["ranks"] = place.parent
    words = "\n".join(PLANTED.values())
    files["log"].write_text(f"{words}\n{WORDINGS['2.4, private pools'].text}\n{words}\n", encoding="utf-8")
    return files


def _told(words: list[str], carriers: dict[str, Path]) -> Iterator[str]:
    from tests.cli.test_cli import call

    page = carriers["out"] / "page.html"
    page.unlink(missing_ok=True)
    result = call(*(word.format(**carriers) for word in words))
    assert result.exit_code == 0, result.output
    yield result.output
    if page.exists():
        yield page.read_text(encoding="utf-8")


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_no_planted_secret_is_left_in_any_format(words: list[str], carriers: dict[str, Path]) -> None:
    for told in _told([words[0], "--redact", *words[1:]], carriers):
        assert len(told) > 200
        assert not left_in(told.replace(str(carriers["out"]), ""))


def test_without_redaction_they_are_there(carriers: dict[str, Path]) -> None:
    """The test before this one can fail: the formats do carry what was planted."""
    told = "".join(t for words in COMMANDS[:5] for t in _told(words, carriers))
    assert len(left_in(told)) > 15


def test_a_redacted_snapshot_holds_none() -> None:
    raw = planted()
    redact_snapshot(raw)
    assert not left_in(json.dumps(raw))
