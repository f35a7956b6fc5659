"""Lists that pickles have in common: read as they are read alone, whatever a pickle does with them."""

from __future__ import annotations

import io
import pickle
import struct
from typing import Any

import pytest

from ckpttool.errors import CkpttoolError
from ckpttool.formats import pickle_writer, pickles
from ckpttool.formats.common_lists import CommonLists
from ckpttool.formats.pickles import Global, Opaque


class Shard:
    """What the lists hold, under a name that is unknown to the reader."""

    def __init__(self, at: int) -> None:
        self.offsets, self.sizes, self.place = [at], [7], {"rank": at, "name": "cpu"}


def rank_pickle(rank: int, shards: int = 40, changed: int | None = None, lists: int = 2) -> bytes:
    """What CPython writes for a rank: a shard of its own, and lists of those of all ranks."""
    tables = [[Shard(i) for i in range(shards)] for _ in range(lists)]
    if changed is not None:
        tables[-1][changed].sizes[0] += 1
    tree = {"own": Shard(rank), "tables": dict(enumerate(tables)), "rank": rank, "again": tables[0]}
    return pickle.dumps(tree, 2)


def both(data: bytes, lists: CommonLists) -> tuple[Any, Any]:
    """(what is read with the lists of earlier pickles, what is read alone); errors by their text."""
    out = []
    for known in (lists, None):
        try:
            out.append(pickles.load(data, lists=known)[0])
        except CkpttoolError as e:
            out.append(str(e))
    return out[0], out[1]


@pytest.mark.slow
@pytest.mark.parametrize("shards", [40, 1000, 1001])  # CPython appends a thousand items at a time
def test_a_list_of_all_ranks_is_read_once(shards: int) -> None:
    lists = CommonLists()
    first, alone = both(rank_pickle(0, shards), lists)
    assert first == alone
    for rank in range(1, 4):
        found, alone = both(rank_pickle(rank, shards), lists)
        assert found == alone
        assert all(found["tables"][k] is first["tables"][k] for k in (0, 1))
        assert found["again"] is first["tables"][0]


def test_a_list_that_differs_is_read_as_what_it_says() -> None:
    lists = CommonLists()
    first, _ = both(rank_pickle(0), lists)
    for changed in (0, 17, 39):
        found, alone = both(rank_pickle(1, changed=changed), lists)
        assert found == alone != first
        assert found["tables"][0] is first["tables"][0]
        assert found["tables"][1][changed].state["sizes"] == [8]
    found, alone = both(rank_pickle(1, shards=41), lists)
    assert found == alone
    assert len(found["tables"][1]) == 41


def test_numbers_that_refer_to_something_else_make_another_list() -> None:
    """The bytes of the list are the same; the names of the attributes, which stand before it, are not."""
    lists = CommonLists()
    data = rank_pickle(0, lists=1)
    first, _ = both(data, lists)
    other = data.replace(b"offsets", b"offsetz", 1)
    found, alone = both(other, lists)
    assert found == alone
    assert {*found["tables"][0][5].state} == {"offsetz", "sizes", "place"}
    assert {*first["tables"][0][5].state} == {"offsets", "sizes", "place"}


def tail_of(first: int, change: bytes) -> bytes:
    """The end of a pickle that does something with the object of a number, and then stops with a tuple."""
    return b"j" + struct.pack("<I", first) + change + b"\x86."


@pytest.mark.parametrize("change", [b"K\x09a", b"(K\x09K\x08e", b"(K\x09K\x08lq\x00a"])
def test_a_pickle_that_changes_a_list_changes_its_own(change: bytes) -> None:
    data = pickle.dumps([[Shard(i) for i in range(40)]], 2)[:-1]
    number = 1  # the outer list is 0
    lists = CommonLists()
    plain = both(data + b"K\x00\x86.", lists)
    assert plain[0] == plain[1]
    inner = plain[0][0][0]
    found, alone = both(data + tail_of(number, change), lists)
    assert found == alone
    assert len(found[0][0]) > 40
    assert len(inner) == 40
    again = both(data + b"K\x00\x86.", lists)
    assert again[0] == again[1] == plain[1]


@pytest.mark.parametrize("number", [1, 2, 9, 100])
@pytest.mark.parametrize("put", ["before", "after", "memoized"])
def test_a_number_used_twice_is_what_it_is_alone(number: int, put: str) -> None:
    """No pickler writes that; torch would read the last object that has the number."""
    body = pickle.dumps([[Shard(i) for i in range(40)]], 2)[2:-1]
    lists = CommonLists()
    both(b"\x80\x02K\x00" + body + b"\x86.", lists)
    own = b"K\x07r" + struct.pack("<I", number)
    get = b"j" + struct.pack("<I", number)
    data = {
        "before": b"\x80\x02" + own + body + b"\x86" + get + b"\x86.",
        "after": b"\x80\x02K\x00" + body + b"\x86" + own + b"\x86" + get + b"\x86.",
        "memoized": b"\x80\x02K\x00" + body + b"\x86X\x01\x00\x00\x00a\x94\x86" + get + b"\x86.",
    }[put]
    found, alone = both(data, lists)
    assert found == alone


def test_bytes_that_are_more_than_a_list_are_not_kept() -> None:
    """The list gets its last items after something else was put above it."""
    open_list = b"\x80\x02]q\x00(K\x03eK\x05h\x00(" + b"]K\x01a" * 300 + b"e\x87."
    lists = CommonLists()
    for _ in range(2):
        found, alone = both(open_list, lists)
        assert found == alone


@pytest.mark.slow
def test_every_cut_and_every_flipped_byte_reads_as_it_does_alone() -> None:
    data = rank_pickle(1, shards=16, lists=1)
    lists = CommonLists()
    both(rank_pickle(0, shards=16, lists=1), lists)
    assert lists.frozen
    for at in range(0, len(data), 3):
        for other in (data[:at], data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]):
            found, alone = both(other, lists)
            assert repr(found) == repr(alone) and found == alone


def test_lists_that_no_other_pickle_has_are_kept_no_longer() -> None:
    lists = CommonLists()
    for rank in range(20):
        found, alone = both(pickle.dumps([Shard(rank + i) for i in range(40)], 2), lists)
        assert found == alone
    assert len(lists.measured) < 8


def test_common_lists_are_written_once_and_read_by_cpython() -> None:
    def shard(i: int) -> Opaque:
        out = Opaque(Global("a.b", "Shard"), ())
        out.state = {"offsets": [i], "place": places[i]}
        return out

    def place(i: int) -> Opaque:
        out = Opaque(Global("a.b", "Place"), ())
        out.state = {"rank": i}
        return out

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            return type(name, (Shard,), {"__init__": object.__init__})

    places = [place(i) for i in range(300)]
    spec = pickle_writer.CommonList(places)
    table = pickle_writer.CommonList([shard(i) for i in range(300)])
    seen: list[set[int]] = []  # the large pieces of each pickle, which live in the lists
    for rank in range(4):
        tree = {"own": {"offsets": [rank]} if rank < 3 else rank, "table": table, "spec": spec, "same": table}
        pieces = pickle_writer.dump_pieces(tree)
        plain = {k: list(x) if isinstance(x, pickle_writer.CommonList) else x for k, x in tree.items()}
        plain["same"] = plain["table"]
        assert b"".join(pieces) == pickle_writer.dump(plain)
        back = Reader(io.BytesIO(b"".join(pieces))).load()
        assert [x.offsets[0] for x in back["table"]] == [x.rank for x in back["spec"]] == [*range(300)]
        assert back["same"] is back["table"]
        assert back["spec"][7] is back["table"][7].place
        seen.append({id(p) for p in pieces if len(p) > 1000})
    assert len(seen[0]) == 2
    assert seen[0] == seen[1] == seen[2] != seen[3]


def test_a_reference_to_an_object_that_is_not_around_it_is_not_written() -> None:
    with pytest.raises(TypeError, match="a reference to an object that is not around it"):
        pickle_writer.dump_pieces({"a": pickles.BackReference(3)})
