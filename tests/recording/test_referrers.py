"""Who holds a tensor, asked of real objects; and a leak found in a real loop, with its holder."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from memprof import analyze, phase, record  # noqa: E402
from memprof.recording import referrers  # noqa: E402
from memprof.recording.referrers import find_holders, holders_of, largest_tensors  # noqa: E402

MIB = 2**20


class Keeper:
    """Something a program keeps."""

    def __init__(self) -> None:
        self.history: list[Any] = []
        self.by_name: dict[str, Any] = {}


def test_attributes_lists_and_nested_dicts_are_named() -> None:
    keeper = Keeper()
    kept, nested = torch.zeros(10), torch.zeros(20)
    keeper.history += [None, kept]
    keeper.by_name["last"] = [(nested, 1)]
    assert holders_of(kept) == ["Keeper.history[1]"]
    assert holders_of(nested) == ["Keeper.by_name['last'][0][0]"]


def test_a_local_variable_is_no_holder_and_asking_keeps_nothing_alive() -> None:
    import weakref

    local = torch.zeros(10)
    assert holders_of(local) == []
    alive = weakref.ref(local)
    del local
    assert alive() is None


def test_the_largest_come_first_one_for_each_storage() -> None:
    big, view, small = torch.zeros(4 * MIB), None, torch.zeros(MIB)
    view = big.view(2, -1)
    found = largest_tensors(lambda storage: False, lambda device: device == "cpu", 2, MIB)
    sizes = [tensor.untyped_storage().nbytes() for tensor in found]
    assert sizes == sorted(sizes, reverse=True)
    assert len({tensor.untyped_storage().data_ptr() for tensor in found}) == len(found)
    assert view is not None
    assert small is not None


def test_a_mistake_in_asking_who_owns_a_tensor_is_not_taken_for_an_odd_tensor() -> None:
    kept = torch.zeros(10)
    with pytest.raises(ZeroDivisionError):
        largest_tensors(lambda _: bool(1 // 0), lambda _: True, 1, kept.untyped_storage().nbytes())


def test_a_leak_in_a_loop_is_named_with_its_holder(tmp_path: Path) -> None:
    model = torch.nn.Linear(64, 64)
    keeper = Keeper()
    with record(tmp_path / "run.pickle", model=model, kind="trace") as session:
        for step in range(1, 5):
            session.set_step(step)
            with phase("forward"):
                out = model(torch.ones(8192, 64))
                keeper.history.append(out.detach().clone())
                del out
    report = analyze(tmp_path / "run.pickle").to_dict()
    left = report["growth"]["left_behind"]
    assert left[0]["bytes"] == 3 * 8192 * 64 * 4
    assert [who for who in left[0]["held_by"] if who.startswith("Keeper.history[")]
    held = [a for a in report["peak"]["allocations"] if a["held_by"]]
    assert held
    assert len(keeper.history) == 4


def test_searches_of_recordings_that_end_at_once_do_not_follow_each_other(tmp_path: Path) -> None:
    keeper = Keeper()
    keeper.history += [torch.zeros(4 * MIB) for _ in range(6)]
    together = threading.Barrier(3)
    found: dict[int, Any] = {}

    def run(number: int) -> None:
        with record(tmp_path / f"{number}.pickle", kind="trace") as session:
            together.wait(60)
        found[number] = session.to_raw()["memprof"]["holders"]

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert len(found) == 3
    names = [name for rows in found.values() for row in rows for name in row[2:]]
    assert len([name for name in names if name.startswith("Keeper.history[")]) >= 3
    assert len(keeper.history) == 6


def test_a_search_ends_after_so_many_objects_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = Keeper()
    keeper.history += [torch.zeros(4 * MIB)]
    every = len(gc.get_objects())
    arguments: Any = (lambda _: False, lambda device: device == "cpu", 1, 16 * MIB)
    whole = find_holders(*arguments)
    assert whole.note is None
    monkeypatch.setattr(referrers, "_MOST_VISITED", 2 * every)
    cut = find_holders(*arguments)
    assert cut.note is not None
    assert f"{2 * every:,} objects" in cut.note
    assert whole.rows[0][1] == ["Keeper.history[0]"] != cut.rows[0][1]


class Odd:
    """Nothing of it can be asked."""

    def __init__(self, *kept: Any) -> None:
        self.kept = kept

    def __raise(self, *_: Any) -> Any:
        raise OSError("ask nothing")

    __repr__ = __str__ = __len__ = __bool__ = __getattr__ = __raise


class OddDict(dict):  # type: ignore[type-arg]
    items = values = get = __iter__ = __len__ = __contains__ = __getitem__ = Odd._Odd__raise  # type: ignore[attr-defined]


class OddList(list):  # type: ignore[type-arg]
    __iter__ = __len__ = __bool__ = __repr__ = Odd._Odd__raise  # type: ignore[attr-defined]


def test_a_search_runs_none_of_the_program_s_code() -> None:
    one, two, three, four = (torch.zeros(n) for n in range(1, 5))
    listed, mapped, odd, keyed = OddList(), OddDict(), Odd(three), {Odd(): four}
    list.append(listed, one)
    dict.__setitem__(mapped, Odd(), two)
    assert holders_of(one) == ["a OddList[0]"]
    assert holders_of(two) == ["a OddDict[<Odd>]"]
    assert holders_of(three) == ["Odd.kept[0]"]
    assert holders_of(four) == ["a dict[<Odd>]"]
    assert type(odd) is Odd
    assert len(keyed) == 1
