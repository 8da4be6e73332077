"""Python objects sent between ranks: which arrive unchanged, which are refused, and bytes that pack() never makes."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import functools
import gc
import importlib.util
import math
import os
import pathlib
import pickle
import signal
import socket
import struct
import sys
import threading
import time
import tracemalloc
import weakref
import zoneinfo
from fractions import Fraction
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest
from drawn import drawn
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_st
from ranks import ranks, tell, until_told

import mscomm
from mscomm import _core
from mscomm.group import Group
from mscomm.job import resolve
from mscomm.packing import pack, packed, unpack

DEEPEST = _core.max_depth

# The examples differ from run to run. Hypothesis prints the one that fails.
settings.register_profile("mscomm", database=None, deadline=None, max_examples=300)
settings.load_profile("mscomm")


@mscomm.register_object
@dataclasses.dataclass(frozen=True)
class Config:
    lr: Any
    layers: Any = dataclasses.field(default=(), repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lr", [self.lr])  # unpack() must not run this, or lr would be a list in a list

    @functools.cached_property
    def depth(self) -> int:
        return len(self.layers)


@mscomm.register_object
@dataclasses.dataclass
class Slots:
    __slots__ = ("x",)
    x: Any


@mscomm.register_object
class Phase(enum.Enum):
    TRAIN = "train"
    TEST = object()  # this value cannot be sent, but Phase.TEST can


@mscomm.register_object
class Access(enum.Flag):
    READ = 1
    WRITE = 2
    BOTH = 3


class Touchy:
    """A class whose instances all have the same hash. Comparing two instances raises an error."""

    def __hash__(self):
        return 1

    def __eq__(self, other):
        raise ArithmeticError("no")


mscomm.register_object(Touchy, lambda x: 0, lambda x: Touchy(), name=f"{__name__}.Touchy")


class Tracked:
    """A class that knows its instances."""

    alive: ClassVar[weakref.WeakSet[Tracked]] = weakref.WeakSet()

    def __init__(self) -> None:
        self.alive.add(self)


mscomm.register_object(Tracked, lambda x: 0, lambda _: Tracked(), name="tracked")


class Ratio(Fraction):
    """A class that is registered with its own encoder and decoder."""


mscomm.register_object(Ratio, lambda x: (x.numerator, x.denominator), lambda parts: Ratio(*parts), name="ratio")


def same(a: Any, b: Any) -> bool:
    """Return whether a and b are equal and have the same types throughout. Here NaN equals NaN, and -0.0 differs from
    0.0.
    """
    if type(a) is not type(b):
        return False
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, field.name), getattr(b, field.name)) for field in dataclasses.fields(a))
    if isinstance(a, (datetime.datetime, datetime.time)):
        return same(a.tzinfo, b.tzinfo) and (a.replace(tzinfo=None), a.fold) == (b.replace(tzinfo=None), b.fold)
    if isinstance(a, datetime.timezone):
        return a == b and a.tzname(None) == b.tzname(None)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same([*a], [*b]) and same([*a.values()], [*b.values()])  # the keys must be in the same order
    if isinstance(a, (set, frozenset)):
        left = list(b)  # searched with same(), because `in` does not find NaN
        for item in a:
            match = next((i for i, other in enumerate(left) if same(item, other)), None)
            if match is None:
                return False
            left.pop(match)
        return not left
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or struct.pack("d", a) == struct.pack("d", b)
    return bool(a == b)


# --- what arrives unchanged -----------------------------------------------------------------------------------------

DTYPES = [*"?bBhHiIlLefdFD", ">i4", ">f8", "S3", "U2", "M8[ns]", "m8[25s]", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]

hashable_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(1 << 200), 1 << 200),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(exclude_categories=[])),  # including lone surrogates, which file names can have
    st.binary(),
    st.sampled_from("?bBhHiIlLefdFD").flatmap(lambda code: numpy_st.from_dtype(np.dtype(code))),
)
zones = st.one_of(
    st.none(),
    st.sampled_from([zoneinfo.ZoneInfo("Europe/Berlin"), datetime.timezone.utc]),
    st.builds(
        datetime.timezone,
        st.timedeltas(datetime.timedelta(hours=-23), datetime.timedelta(hours=23)),
        st.text(),
    ),
)
times = st.one_of(
    st.dates(),
    st.timedeltas(),
    st.builds(lambda x, zone, fold: x.replace(tzinfo=zone, fold=fold), st.datetimes(), zones, st.integers(0, 1)),
    st.builds(lambda x, zone, fold: x.replace(tzinfo=zone, fold=fold), st.times(), zones, st.integers(0, 1)),
)
named_values = st.one_of(
    times,
    st.sampled_from([*Phase, *Access, Access(0), Ratio(1, 3)]),
    st.builds(pathlib.Path, st.text(st.characters(exclude_categories=[], exclude_characters="\0"), max_size=5)),
    st.sampled_from([pathlib.PurePosixPath("/a/../b"), pathlib.PureWindowsPath("C:\\x")]),
)
arrays = st.builds(
    lambda dtype, shape, order: np.arange(math.prod(shape)).reshape(shape, order=order).astype(dtype),
    st.sampled_from(DTYPES),
    numpy_st.array_shapes(min_dims=0, min_side=0, max_side=3),
    st.sampled_from("CF"),
)


@st.composite
def keys(draw: Any, depth: int = 0) -> Any:
    """Draw a value that can be a key of a dict or an element of a set."""
    kind = draw(st.sampled_from([None, None, None, tuple, frozenset])) if depth < 2 else None
    if kind is None:
        return draw(st.one_of(hashable_values, named_values))
    return kind(draw(keys(depth + 1)) for _ in range(draw(st.integers(0, 3))))


@st.composite
def objects(draw: Any, depth: int = 0) -> Any:
    kinds = [None, np.ndarray]
    if depth < 4:
        kinds += [list, list, tuple, dict, dict, set, frozenset, collections.OrderedDict, Config, Slots]
    kind = draw(st.sampled_from(kinds))
    if kind is None:
        return draw(st.one_of(hashable_values, named_values))
    if kind is np.ndarray:
        return draw(arrays)
    if dataclasses.is_dataclass(kind):
        return kind(draw(objects(depth + 1)))
    size = draw(st.integers(0, 4))
    if kind in (set, frozenset):
        return kind(draw(keys()) for _ in range(size))
    if kind in (dict, collections.OrderedDict):
        return kind((draw(keys()), draw(objects(depth + 1))) for _ in range(size))
    return kind(draw(objects(depth + 1)) for _ in range(size))


@drawn(objects())  # objects are slow to draw
def test_what_is_packed_comes_back_with_its_types(obj):
    assert same(unpack(pack(obj)), obj)


@pytest.mark.parametrize(
    "number", [0, -1, 127, 128, -(1 << 63), (1 << 64) - 1, 1 << 64, -(1 << 63) - 1, 10**1000, -(10**1000)]
)
def test_integers_of_any_size_come_back(number):
    assert same(unpack(pack(number)), number)


@pytest.mark.parametrize("obj", [True, 1, 1.0, np.int64(1), np.float64(1), np.bool_(True), 1 + 0j], ids=repr)
def test_equal_numbers_of_different_types_stay_different(obj):
    assert type(unpack(pack([obj]))[0]) is type(obj)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 3)], ids=str)
def test_arrays_keep_dtype_and_shape(dtype, shape):
    x = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
    assert same(unpack(pack(x)), x)


def test_an_array_that_came_is_ones_own():
    x = unpack(pack(np.arange(6).reshape(2, 3).T))
    x[0, 0] = 7
    assert x.flags.c_contiguous
    assert x.flags.owndata


def test_bfloat16_scalars_keep_their_type():
    assert same(unpack(pack(ml_dtypes.bfloat16(1.5))), ml_dtypes.bfloat16(1.5))


def test_an_object_at_two_places_is_sent_once_and_stays_one_object():
    row, table, weights, members, config = [1], {2: "x"}, np.ones(1 << 15), {3}, Slots([4])
    obj = [row, (row, {2: row}), table, {"t": table}, weights, [weights], members, [members], config, {"c": config}]
    data = pack([obj, obj])
    first, second = unpack(data)
    assert len(data) < 1.1 * weights.nbytes
    assert first is second and same(first, obj)
    assert first[0] is first[1][0] is first[1][1][2]
    assert all(first[i] is other for i, other in ((2, first[3]["t"]), (4, first[5][0]), (6, first[7][0])))
    assert first[8] is first[9]["c"] and first[8].x == [4]


def test_an_object_in_a_tuple_that_occurs_twice_stays_one_object():
    inner = ({"a": [1]},)
    obj = [inner, [inner], ((Tracked(),), frozenset([Tracked()])), Config([2])]
    first, second = unpack(pack([tuple(obj), tuple(obj)]))
    assert first[0][0] is first[1][0][0] is second[0][0] and first[1] is second[1]
    assert first[2][0][0] is second[2][0][0] and {*first[2][1]} == {*second[2][1]}
    assert first[3].lr is second[3].lr


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed")
def test_tied_weights_stay_tied():
    import torch

    weight = torch.ones(1000)
    back = unpack(pack({"embedding": weight, "head": weight, "other": torch.ones(1000)}))
    assert back["embedding"] is back["head"] and back["other"] is not back["head"]


def test_lists_that_contain_one_list_many_times_are_sent_once():
    obj: Any = [1]
    for _ in range(100):
        obj = [obj, obj]
    assert len(pack(obj)) < 2000
    back = unpack(pack(obj))
    for _ in range(100):
        assert back[0] is back[1]
        back = back[0]
    assert back == [1]


def test_bools_whose_byte_is_neither_0_nor_1_are_sent_as_true():
    few = np.array([0, 1, 2, 255], np.uint8).view(np.bool_)
    for x in (few, np.tile(few, 1 << 15), np.tile(few, 1 << 16)[::2], few[3:].reshape(())):
        assert same(unpack(pack(x)), np.asarray(x.view(np.uint8) != 0))


PLAIN_DATA = {
    "floats": [i * 0.5 for i in range(30_000)],
    "texts": [f"sample-{i}" for i in range(30_000)],
    "rows": [{"id": i, "score": i * 0.5, "box": [0.5, 1.5], "ok": True} for i in range(10_000)],
}


@pytest.mark.parametrize("name", PLAIN_DATA)
def test_plain_data_are_read_and_written_without_python_code_for_each_value(name):
    calls: list[str] = []
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    try:
        back = unpack(pack(PLAIN_DATA[name]))
    finally:
        sys.setprofile(None)
    assert back == PLAIN_DATA[name]
    assert len(calls) < 500


def peak_of(call: Any) -> tuple[int, Any]:
    """Return how much more memory was in use during the call than before it, and the result."""
    tracemalloc.start()
    try:
        result = call()
        return tracemalloc.get_traced_memory()[1], result
    finally:
        tracemalloc.stop()


def test_many_arrays_are_copied_once_on_each_side():
    arrays = {f"{i}": np.full(1 << 17, i, np.float64) for i in range(20)}
    size = sum(x.nbytes for x in arrays.values())
    written, data = peak_of(lambda: bytes_of(arrays))
    read, back = peak_of(lambda: unpack(data, given_bytes=data.size))
    assert same(back, arrays)
    assert max(written, read) < 1.1 * size
    assert all(x.flags.owndata for x in back.values())  # so that one array does not keep the memory of all
    few = unpack(bytes_of(one := {"w": arrays["1"], "b": arrays["2"]}), given_bytes=2 << 20)
    assert same(few, one) and few["w"].flags.writeable


def bytes_of(obj: Any) -> np.ndarray[Any, Any]:
    made = packed(obj)
    data = np.empty(made.size, np.uint8)
    made.write(data)
    return data


@pytest.mark.parametrize("innermost", [1, [], (), {}, set(), 1j, 1 << 99, np.float32(1), np.ones((2, 2))], ids=repr)
def test_objects_may_be_as_deep_as_promised(innermost):
    deep = innermost
    for _ in range(DEEPEST - isinstance(innermost, (list, tuple, dict, set))):
        deep = [deep]
    assert same(unpack(pack(deep)), deep)


def test_an_object_is_a_length_and_a_value():
    data = pack({"a": [1, (2, 300)], "b": b"x" * 255})
    inner = bytes([LIST, 2, INT8, 1, TUPLE, 2, INT8, 2, INT16, 44, 1])
    long = bytes([BYTES, 255]) + (255).to_bytes(8, "little") + b"x" * 255
    value = bytes([FIRST, DICT, 2, TEXT, 1]) + b"a" + inner + bytes([TEXT, 1]) + b"b" + long
    assert data == whole(value)


# --- classes that are registered ------------------------------------------------------------------------------------


def test_a_dataclass_comes_back_as_it_was():
    whole = Config(0.5, [1])
    assert whole.depth == 1  # this cached property is now stored in `whole`, but must not be sent
    back = unpack(pack(whole))
    assert back == whole and back.lr == [0.5] and "depth" not in vars(back)
    object.__setattr__(whole, "late", 1)
    with pytest.raises(
        TypeError, match=r"^obj\[1\]: a .*Config cannot be sent: has attributes that are not fields \(late"
    ):
        pack([1, whole])


def test_a_class_is_registered_once_under_one_name():
    with pytest.raises(ValueError, match=r"the name 'ratio' is that of .*Ratio; give another name="):
        mscomm.register_object(Fraction, str, Fraction, name="ratio")
    with pytest.raises(ValueError, match="Ratio is registered as 'ratio' already"):
        mscomm.register_object(Ratio, str, Ratio)
    for cls in (dict, int, np.ndarray, np.float32):
        with pytest.raises(ValueError, match="are sent as they are"):
            mscomm.register_object(cls, str, cls)
    for cls in (Fraction, Point, Ratio):
        with pytest.raises(TypeError, match="is neither a dataclass nor an Enum; give encode and decode"):
            mscomm.register_object(cls)
    with pytest.raises(TypeError, match="give both encode and decode, or neither"):
        mscomm.register_object(Fraction, str)
    with pytest.raises(TypeError, match="is not a class"):
        mscomm.register_object(Config(1))

    @dataclasses.dataclass
    class Message(Exception):
        text: str

    with pytest.raises(TypeError, match="has a __new__ of its own"):
        mscomm.register_object(Message)


def test_a_class_that_is_defined_again_replaces_the_old_one():
    def define() -> type:
        @mscomm.register_object
        @dataclasses.dataclass
        class Cell:
            x: int

        return Cell

    old, new = define(), define()
    assert type(unpack(pack(new(1)))) is new
    with pytest.raises(TypeError, match=r"Cell cannot be sent; register its class"):
        pack(old(1))


def test_a_decoder_may_return_an_object_of_another_type():
    class Rows:
        pass

    mscomm.register_object(Rows, lambda obj: [1, 2], tuple)
    rows = Rows()
    assert unpack(pack(rows)) == (1, 2) and unpack(pack([rows, Rows()])) == [(1, 2), (1, 2)]
    with pytest.raises(mscomm.Error, match="a tuple that cannot be shared"):  # it can be hashed, unlike the Rows
        unpack(pack([rows, rows]))


def test_an_encoder_cannot_go_on_for_ever():
    class Endless:
        pass

    mscomm.register_object(Endless, lambda obj: [Endless()], len)
    with pytest.raises(ValueError, match=f"containers are nested more than {DEEPEST} deep"):
        pack(Endless())
    mscomm.register_object(Endless, lambda obj: obj, len)
    with pytest.raises(ValueError, match="obj: it contains itself"):
        pack(Endless())


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed")
def test_tensors_that_are_no_plain_ones_are_refused():
    import torch

    with pytest.raises(TypeError, match=r"^obj\[0\]: a torch tensor cannot be sent: it is on meta"):
        pack([torch.ones(2, device="meta")])
    with pytest.raises(
        TypeError, match=r"^obj: a torch\.nn\.parameter\.Parameter cannot be sent; give it as x\.detach\(\)"
    ):
        pack(torch.nn.Parameter(torch.ones(2)))


# --- pickles --------------------------------------------------------------------------------------------------------


def test_what_has_no_other_form_is_pickled_where_it_is_allowed():
    obj = {
        "a": [Fraction(1, 3), np.array([None, "x"]), Point(1, 2), Unknown(3), np.longdouble(1)],
        "b": Config(range(3)),
    }
    data = pack(obj, True)
    back = unpack(data, True)
    assert back["b"] == obj["b"] and [*map(type, back["a"])] == [*map(type, obj["a"])]
    assert back["a"][0] == Fraction(1, 3) and back["a"][1].tolist() == [None, "x"]
    with pytest.raises(mscomm.Error, match=r"a fractions\.Fraction was received as a pickle.* pass allow_pickle=True"):
        unpack(data)
    with pytest.raises(TypeError, match=r"^obj\[0\]: a _thread\.lock cannot be pickled: "):
        pack([threading.Lock()], True)
    assert b"pickle" not in pack({"x": (1, 2.5)}, True) and pack([1], True) == pack([1])


def test_a_pickle_that_cannot_be_read_is_an_error():
    for data in (b"", b"abc", pickle.dumps(Fraction(1, 3))[:-1], b"c__main__\nno_such_name\n."):
        with pytest.raises(mscomm.Error, match=r"unpack: the pickle of a x\.Y: "):
            unpack(whole(made(PICKLE, "x.Y", data)), True)


# --- what is refused ------------------------------------------------------------------------------------------------

Point = collections.namedtuple("Point", "x y")


class Colour(enum.IntEnum):
    RED = 1


@dataclasses.dataclass
class Unknown:
    x: int


REGISTER = "mscomm.register_object"


class Own(np.ndarray):
    pass


class Picklable:
    def __reduce__(self) -> Any:
        raise AssertionError("somebody pickles")


@pytest.mark.parametrize(
    ("obj", "message"),
    [
        (
            {"model": [1, 2, 3, threading.Lock()]},
            'obj["model"][3]: a _thread.lock cannot be sent; see mscomm.register_object',
        ),
        (object(), "obj: an object cannot be sent; see mscomm.register_object"),
        (len, "obj: a builtin_function_or_method cannot be sent; see mscomm.register_object"),
        ([Fraction(1)], "obj[0]: a fractions.Fraction cannot be sent; see mscomm.register_object"),
        ((1, {2: {3.5: bytearray()}}), "obj[1][2][3.5]: a bytearray cannot be sent; see mscomm.register_object"),
        (
            {"a": {(1, len): 1}},
            '(key of obj["a"])[1]: a builtin_function_or_method cannot be sent; see mscomm.register_object',
        ),
        (
            [{(1, len)}],
            "(element of obj[0])[1]: a builtin_function_or_method cannot be sent; see mscomm.register_object",
        ),
        (Point(1, 2), f"obj: a {__name__}.Point cannot be sent; make it a plain tuple"),
        (
            [Colour.RED],
            f"obj[0]: a {__name__}.Colour cannot be sent; register its class on every rank: {REGISTER}(Colour)",
        ),
        (
            {"cfg": Unknown(1)},
            f'obj["cfg"]: a {__name__}.Unknown cannot be sent; register its class on every rank: {REGISTER}(Unknown)',
        ),
        (Config(1, [len]), "obj.layers[0]: a builtin_function_or_method cannot be sent; see mscomm.register_object"),
        (collections.defaultdict(list), "obj: a collections.defaultdict cannot be sent; make it a plain dict"),
        (np.str_("a"), "obj: a numpy.str_ cannot be sent; make it a plain str"),
        (np.arange(2).view(Own), f"obj: a {__name__}.Own cannot be sent; give it as np.asarray(...)"),
        ([np.array([None])], "obj[0]: an array of dtype object cannot be sent"),
        (np.zeros(1, "i4,f4"), "obj: an array of dtype [('f0', '<i4'), ('f1', '<f4')] cannot be sent"),
        (np.longdouble(1), "obj: a scalar of dtype float128 cannot be sent"),
        (
            {"k" * 99: range(3)},
            'obj["kkkkkkkkkkkk...kkkkkkkkkkkkk"]: a range cannot be sent; see mscomm.register_object',
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_sent_is_named_with_its_place(obj, message):
    with pytest.raises(TypeError) as caught:
        pack(obj)
    assert str(caught.value) == message


def test_a_socket_is_refused_even_where_a_list_holds_everything_else():
    with socket.socket() as sock, pytest.raises(TypeError, match=r'^obj\["model"\]\[3\]: a socket\.socket cannot'):
        pack({"model": [1, 2, 3, sock]})


def test_a_container_inside_itself_is_refused_with_both_places():
    inner: list[Any] = [1]
    inner.append({"back": inner})
    with pytest.raises(ValueError, match=r'^obj\[0\]\[1\]\["back"\]: it contains itself.* object as obj\[0\]$'):
        pack([inner])


def test_containers_too_deep_are_refused_with_their_place():
    deep: Any = 1
    for _ in range(DEEPEST + 1):
        deep = (deep,)
    with pytest.raises(ValueError, match=rf"^obj(\[0\]){{{DEEPEST}}}: containers are nested more than {DEEPEST} deep"):
        pack(deep)


@pytest.mark.parametrize("keys", [0, 1], ids=["a set", "a dict"])
def test_many_integers_with_one_hash_are_refused(keys):
    """Python's hash of an int is the int modulo 2**61 - 1. A set of n such ints takes a time of n squared to build."""
    same = [1 + place * sys.hash_info.modulus for place in range(1000)]
    many = [*same, *range(2, 5000)]
    assert unpack(pack(dict.fromkeys(many) if keys else set(many))) == (dict.fromkeys(many) if keys else set(many))
    many.append(1 + 1000 * sys.hash_info.modulus)
    data = pack(dict.fromkeys(many) if keys else set(many))
    with pytest.raises(mscomm.Error, match=r"an? (key|element) has the same hash as 1000 others"):
        unpack(data)


def test_nothing_is_pickled():
    with pytest.raises(TypeError, match="Picklable cannot be sent"):
        pack([Picklable()])
    with pytest.raises(mscomm.Error):
        unpack(pickle.dumps([1, 2]))


# --- bytes that pack() never makes ----------------------------------------------------------------------------------


def refused_or_read(data: bytes) -> None:
    """Check that unpack() either returns an object or raises Error."""
    try:
        unpack(data)
    except mscomm.Error as error:
        assert str(error).startswith("unpack: ")


@drawn(objects(), st.data())
def test_damaged_bytes_are_an_error_or_another_object(obj, data):
    damaged = bytearray(pack(obj))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(damaged)))
        how_many = data.draw(st.sampled_from([0, 0, 1, 1, 1, 5]))
        damaged[place : place + how_many] = data.draw(st.binary(max_size=3))
    refused_or_read(bytes(damaged))


@given(st.binary(max_size=200))
@example(b"")
@example(b"\xc1")
def test_any_bytes_are_an_error_or_an_object(data):
    refused_or_read(data)


class Reentrant:
    """A class whose encode and decode functions call `then`."""

    def then(self) -> None:
        pass


mscomm.register_object(Reentrant, lambda x: x.then(), lambda _: Reentrant.then(Reentrant()), name="reentrant")


@pytest.mark.parametrize("change", ["clear", "grow", "replace"])
@pytest.mark.parametrize("kind", [list, set, dict])
def test_a_container_that_an_encoder_changes_is_an_error_or_sent_as_it_was(kind, change):
    def fill(texts: list[str]) -> None:
        if kind is dict:
            obj.update({one: ["first"]} | {text: [text] for text in texts})
        else:
            (obj.extend if kind is list else obj.update)([one, *texts])

    def then() -> None:
        if change != "grow":
            obj.clear()
        if change != "clear":
            fill([f"{i}" * 60 for i in range(100 + (change == "grow"))])

    obj, one = kind(), Reentrant()
    fill([f"{i}" * 50 for i in range(100)])
    one.then = then
    try:
        back = unpack(pack(obj))
    except RuntimeError as error:
        assert "changed" in str(error)
    else:
        assert change == "replace" and type(back) is kind


def test_a_decoder_sees_no_container_that_is_not_complete(monkeypatch):
    seen: list[Any] = []

    def then(self: Reentrant) -> None:
        seen.append([x for x in gc.get_objects() if type(x) in (list, tuple, dict) and len(x) == 12345])

    data = pack([kind([(i, i) for i in range(12344)] + [(Reentrant(), 1)]) for kind in (list, tuple, dict)])
    monkeypatch.setattr(Reentrant, "then", then)
    back = unpack(data)
    assert [len(x) for x in back] == [12345] * 3
    assert [{*map(type, some)} for some in seen] == [set(), {list}, {list, tuple}]


def test_nothing_keeps_what_was_packed_or_refused_or_half_read():
    part, row = Tracked(), ["text" * 20]
    obj = [part, row, {"a": part, (1, 2): row}, {3.5}, frozenset({part}), np.ones(2), 1 << 80, (row, 1j)]
    bad = [*obj, object()]
    data = pack(obj)

    def references() -> list[int]:
        return [sys.getrefcount(x) for x in (part, row, row[0], obj, bad)]

    before = references()
    for _ in range(10):
        pack(obj)
        with pytest.raises(TypeError):
            pack(bad)
    for end in range(len(data)):
        with pytest.raises(mscomm.Error):
            unpack(data[:end])
    gc.collect()
    assert references() == before
    assert {*Tracked.alive} == {part}


def test_a_signal_interrupts_what_would_take_for_ever():
    obj: Any = 1
    for _ in range(60):
        obj = (obj, obj)  # tuples are not shared, so these are 2**60 integers

    def handler(*_: Any) -> None:
        raise InterruptedError("enough")

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(InterruptedError, match="enough"):
            pack(obj)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@drawn(objects())
def test_no_prefix_of_an_object_is_an_object(obj):
    whole = pack(obj)
    for end in {0, 1, len(whole) // 2, len(whole) - 1} - {len(whole)}:
        with pytest.raises(mscomm.Error, match="unpack: "):
            unpack(whole[:end])


NONE, NO, YES, INT8, INT16, INT32, INT64, REAL, COMPLEX, TEXT, BYTES = range(11)
LIST, TUPLE, SET, FROZENSET, DICT, MADE, FIRST, AGAIN = range(11, 19)
NAMED, INTEGER, ARRAY, SCALAR, PICKLE = range(5)
LONG = b"\xff" * 9  # a count that is much larger than the input


class Raw(bytes):
    """A value that is converted to bytes already."""


def value(obj: Any) -> Raw:
    data = pack(obj)
    return Raw(data[8:][: int.from_bytes(data[:8], "little")].removeprefix(bytes([FIRST])))


def values(*parts: Any) -> bytes:
    return bytes([len(parts)]) + b"".join(part if type(part) is Raw else value(part) for part in parts)


def items(tag: int, *parts: Any) -> Raw:
    """Return the bytes of a list, tuple, set or frozenset."""
    return Raw(bytes([tag]) + values(*parts))


def made(kind: int, *parts: Any) -> Raw:
    return Raw(bytes([MADE, kind]) + values(*parts))


def whole(value: bytes, large: bytes = b"") -> bytes:
    """Return the bytes of an object that consists of this value and the elements of a large array."""
    start = len(value).to_bytes(8, "little") + value
    return start + bytes(-len(start) % 64) + large + bytes(-len(large) % 64)


CONFIG, PHASE, ACCESS, TOUCHY = (f"{__name__}.{name}" for name in ("Config", "Phase", "Access", "Touchy"))

HOSTILE = {
    "nothing": (b"", "the bytes end too early"),
    "two objects": (value(1) + value(2), "more bytes follow"),
    "an unknown tag": (b"\x7f", "unknown tag 127"),
    "a long list": (bytes([LIST]) + LONG, "end too early"),
    "a list that is too long by one": (bytes([LIST, 3]) + value(None) * 2, "end too early"),
    "lists that share their items": (
        bytes([LIST, 255, *(4000).to_bytes(8, "little")]) * 500,
        "end too early",
    ),
    "a value that needs the bytes of the next one": (bytes([LIST, 2, REAL]) + bytes(8), "end too early"),
    "a long dict": (bytes([DICT]) + LONG + value(1) * 9, "end too early"),
    "a dict without the last value": (bytes([DICT, 2]) + value(None) * 3, "end too early"),
    "a long text": (bytes([TEXT]) + LONG + b"a", "end too early"),
    "long bytes": (bytes([BYTES]) + LONG + b"a", "end too early"),
    "half a number": (bytes([INT32, 0, 0]), "end too early"),
    "half a count": (bytes([LIST, 255, 1]), "end too early"),
    "lists too deep": (bytes([LIST, 1]) * 5000 + value(1), "deep"),
    "dicts too deep": ((bytes([DICT, 1]) + value(1)) * 5000 + value(1), "deep"),
    "no UTF-8": (bytes([TEXT, 1]) + b"\xff", "utf-8"),
    "a kind alone": (bytes([MADE, ARRAY]), "end too early"),
    "an unknown kind": (made(99, 1), "unknown kind 99"),
    "a list in an array": (made(ARRAY, "<f8", b"", [1]), "deep"),
    "arrays too deep": (bytes([MADE, ARRAY, 1]) * 5000 + value(1), "deep"),
    "a list as a key": (bytes([DICT, 1]) + value([]) + value(1), "a list cannot be a key: TypeError"),
    "a set of sets": (items(SET, set()), "a set cannot be an element: TypeError: unhashable"),
    "a list in an element": (items(FROZENSET, ([],)), "a tuple cannot be an element: TypeError: unhashable"),
    "a key twice": (bytes([DICT, 2]) + value("a") + value(1) + value("a") + value(2), "a key occurs twice"),
    "an element twice": (items(SET, 1, 1.0), "an element occurs twice"),
    "half a complex": (bytes([COMPLEX]) + bytes(8), "end too early"),
    "an integer in two parts": (made(INTEGER, b"1", b"1"), "2 parts, expected 1"),
    "an integer of text": (made(INTEGER, "1"), "a str, expected a bytes"),
    "an array of objects": (made(ARRAY, "|O", b"\0" * 8, 1), "dtype '|O'"),
    "an array without elements": (made(ARRAY, "<f8"), "1 parts of an array"),
    "an array of a number": (made(ARRAY, 8, b""), "dtype 8"),
    "an array of records": (made(ARRAY, "i4,O", b"\0" * 12, 1), "dtype 'i4,O'"),
    "an array of an unknown time": (made(ARRAY, "<M8[x]", b"\0" * 8, 1), "dtype"),
    "an array of times of no length": (made(ARRAY, "<m8[0s]", b"\0" * 8, 1), "dtype '<m8"),
    "elements that cannot be compared": (
        items(SET, *[made(NAMED, TOUCHY, i) for i in range(2)]),
        "a Touchy cannot be an element: ArithmeticError: no",
    ),
    "an array of huge elements": (made(ARRAY, "|S999999999", b"abc", 1), "3 bytes for an array"),
    "a huge array": (made(ARRAY, "<f8", b"\0" * 8, 1 << 40), "8 bytes for an array"),
    "an array whose size wraps": (made(ARRAY, "<f8", b"", 1 << 61, 8), "0 bytes for an array"),
    "an array of less than nothing": (made(ARRAY, "<f8", b"\0" * 8, -1, -1), "a shape"),
    "an array with a shape of truths": (made(ARRAY, "|u1", b"\0", True), "a shape"),
    "an empty array with a huge shape": (made(ARRAY, "<f8", b"", 0, 1 << 61), "too big|too large"),
    "an array of too many dimensions": (made(ARRAY, "|u1", b"\0", *[1] * 65), "a shape"),
    "a bool that is neither": (made(ARRAY, "|b1", b"\0\2", 2), "neither True nor False"),
    "a scalar of two": (made(SCALAR, "<f4", b"\0" * 8), "8 bytes for a scalar"),
    "a scalar of text": (made(SCALAR, "|S3", b"abc"), "3 bytes for a scalar"),
    "a class that nobody registered": (made(NAMED, "os.system", "true"), "'os.system': call mscomm.register_object"),
    "a class without a value": (made(NAMED, CONFIG), "1 parts, expected 2"),
    "a class with a number for a name": (made(NAMED, 1, 1), "a int, expected a str"),
    "classes too deep": ((bytes([MADE, NAMED, 2]) + value("ratio")) * 5000 + value(1), "deep"),
    "a field too few": (
        made(NAMED, CONFIG, {"lr": 1}),
        "the fields are lr, layers, but the received object has lr: do the",
    ),
    "a field too many": (
        made(NAMED, CONFIG, {"lr": 1, "layers": 1, "x": 1}),
        "the received object has lr, layers, x",
    ),
    "fields that are none": (made(NAMED, CONFIG, [1, 2]), "the received object has a list"),
    "a member that is none": (made(NAMED, PHASE, "DREAM"), "'DREAM' is not one of the members TRAIN, TEST"),
    "a member by a list": (made(NAMED, PHASE, ["TRAIN"]), "is not one of the members"),
    "flags by a text": (made(NAMED, ACCESS, "READ"), "a str, expected a list of names"),
    "flags that are none": (made(NAMED, ACCESS, ["READ", "X"]), "'X' is not one of the members"),
    "a decoder that fails": (
        made(NAMED, "ratio", [1, 0]),
        "a ratio cannot be created from the received data: ZeroDivisionError",
    ),
    "a date of texts": (made(NAMED, "datetime.date", ["1", "2", "3"]), "expected a list of 3 ints"),
    "a date by its bytes": (made(NAMED, "datetime.date", b"\x07\xe8\x01\x01"), "expected a list of 3 ints"),
    "a date that is none": (made(NAMED, "datetime.date", [2024, 2, 30]), "ValueError: day"),
    "a time too long": (made(NAMED, "datetime.timedelta", [1 << 60, 0, 0]), "OverflowError"),
    "a time of text": (made(NAMED, "datetime.time", [[1, 2, 3, 4, 0], "UTC"]), "TypeError: tzinfo"),
    "a time zone outside": (
        made(NAMED, "zoneinfo.ZoneInfo", "../../etc/passwd"),
        "zoneinfo.ZoneInfo cannot be created",
    ),
    "a time zone that is none": (made(NAMED, "zoneinfo.ZoneInfo", "Mars/Base"), "ZoneInfoNotFoundError"),
    "a path of bytes": (made(NAMED, "pathlib.PosixPath", b"x"), "a bytes, expected a str"),
    "an order of a list": (made(NAMED, "collections.OrderedDict", [1]), "a list, expected a dict"),
    "a tensor of text": (made(NAMED, "torch tensor", "x"), "a str, expected an array"),
    "the elements of a large array are missing": (made(ARRAY, "<f8", 1 << 40, 1 << 37), "0 bytes for an array"),
    "an array of fewer than no elements": (made(ARRAY, "<f8", -8, 1), "a shape|bytes for an array|expected a bytes"),
    "an object again that never came": (bytes([AGAIN, 0]), "the shared object 0 before it is complete"),
    "an object in itself": (bytes([FIRST, LIST, 1, AGAIN, 0]), "object 0 before it is complete"),
    "an object that is numbered twice": (bytes([FIRST]) * 5000 + value([1]), "a shared object that is another"),
    "an object again that is shared": (
        bytes([LIST, 2, FIRST, LIST, 0, FIRST, AGAIN, 0]),
        "a shared object that is another",
    ),
    "a tuple that is shared": (bytes([LIST, 2, FIRST, TUPLE, 0, AGAIN, 0]), "a tuple that cannot be shared"),
    "a frozenset that is shared": (
        bytes([LIST, 2, FIRST, FROZENSET, 0, AGAIN, 0]),
        "a frozenset that cannot be shared",
    ),
    "a pickle that nobody allowed": (made(PICKLE, "x.Y", pickle.dumps(1)), "a x.Y was received as a pickle"),
    "a pickle of text": (made(PICKLE, "x.Y", "text"), "a str, expected a bytes"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bytes_are_refused_before_anything_large_is_made(name):
    data, message = HOSTILE[name]
    tracemalloc.start()
    try:
        with pytest.raises(mscomm.Error, match=message):
            unpack(whole(data))
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("data", ["text", 5, [1], None], ids=repr)
def test_unpack_takes_bytes_alone(data):
    with pytest.raises(TypeError, match="bytes-like"):
        unpack(data)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda data: np.frombuffer(data, np.uint8)])
def test_bytes_may_lie_in_any_buffer(kind):
    assert unpack(kind(pack((1, "a")))) == (1, "a")


# --- between ranks --------------------------------------------------------------------------------------------------


@ranks(3)
def test_all_gather_object_gives_every_ranks_object(rank, group):
    mine = [None, {"rank": 1, "x": np.arange(3, dtype=np.int8)}, ("long", "text" * 10000)]
    gathered = mscomm.all_gather_object(mine[rank])
    assert all(map(same, gathered, mine))
    assert len(gathered) == 3


@ranks(2)
def test_objects_with_a_large_array_take_twice_their_memory_at_most(rank, group):
    x = np.arange(1 << 20, dtype=np.float64)
    mine = x if rank == 0 else None
    calls = [
        (1, lambda: mscomm.broadcast_object(mine)),
        (1, lambda: mscomm.scatter_object(None if rank else [None, x])),
        (1, lambda: mscomm.recv_object(0) if rank else mscomm.send_object(x, 1)),
        (2, lambda: mscomm.all_gather_object(x)),
        (2, lambda: mscomm.gather_object(x)),
    ]
    for results, call in calls:
        peak, got = peak_of(call)
        assert peak < 1.1 * results * x.nbytes
        assert all(same(one, x) for one in (got if type(got) is list else [got]) if one is not None)


@ranks(3)
def test_broadcast_object_gives_the_roots_object(rank, group):
    for root in range(3):
        mine = {"from": rank, "rows": [(1, 2.5)] * (1000 * root)}
        assert mscomm.broadcast_object(mine, root) == {"from": root, "rows": [(1, 2.5)] * (1000 * root)}


@ranks(3)
def test_gather_object_gives_every_ranks_object_to_the_root_alone(rank, group):
    mine = [None, Config(1.5, (Phase.TRAIN,)), {"text": "x" * 100_000}]
    for root in range(3):
        gathered = mscomm.gather_object(mine[rank], root)
        assert gathered is None if rank != root else all(map(same, gathered, mine)) and len(gathered) == 3


@ranks(3)
def test_scatter_object_gives_each_rank_its_item(rank, group):
    items = [None, Config(1.5, (Phase.TRAIN,)), {"text": "x" * 100_000}]
    for root in range(3):
        got = mscomm.scatter_object(items if rank == root else object(), root)
        assert same(got, items[rank]) and (got is None or got is not items[rank])
    number = resolve(None).core.where()[0]
    if rank == 0:
        for wrong, kind, text in (
            (None, TypeError, "objs is a NoneType at the root; expected a list"),
            ("abc", TypeError, "objs is a str"),
            ([1, 2], ValueError, "objs has 2 items; the group has 3 ranks"),
            ([1, {"a": len}, 3], TypeError, r'^objs\[1\]\["a"\]: a builtin_function_or_method cannot be sent'),
        ):
            with pytest.raises(kind, match=text):
                mscomm.scatter_object(wrong)
    assert resolve(None).core.where()[0] == number
    part = mscomm.split(None if rank == 0 else 0)
    if part:
        assert mscomm.scatter_object([rank, "b"] if rank == 1 else None, 0, group=part) == (1 if rank == 1 else "b")


@ranks(2)
def test_objects_go_from_rank_to_rank_by_tag_and_in_order(rank, group):
    things = [None, Config(0.5), np.arange(1 << 20), {"text": "x" * 40_000}]
    if rank == 0:
        mscomm.send_object("small", 1, tag=3)  # returns without waiting for the recv
        mscomm.send_object("other", 1, tag=4)
        for thing in things:
            mscomm.send_object(thing, 1, tag=3)
        mscomm.send(np.arange(3), 1, tag=3)
        assert mscomm.recv_object(1) == "back"
    else:
        assert mscomm.recv_object(0, tag=4) == "other"
        assert mscomm.recv_object(0, tag=3) == "small"
        assert all(same(mscomm.recv_object(0, tag=3), thing) for thing in things)
        assert mscomm.recv(np.empty(3, np.int64), 0, tag=3).tolist() == [0, 1, 2]  # arrays and objects stay in order
        mscomm.send_object("back", 0)
    for wrong in (2, -1, "0"):
        with pytest.raises((TypeError, ValueError), match=r"send_object: dst"):
            mscomm.send_object(1, wrong)
        with pytest.raises((TypeError, ValueError), match=r"recv_object: src"):
            mscomm.recv_object(wrong)
    with pytest.raises(ValueError, match="send_object: tag"):
        mscomm.send_object(1, 0, tag=1 << 31)


@ranks(3)
def test_an_object_from_any_rank_with_any_tag_says_whose_it_was(rank, group):
    """All objects are there before rank 0 takes the first one, and those of both ranks have the same lengths."""
    if rank == 0:
        until_told("rank 1 has sent", "rank 2 has sent")
        for left in range(20, 0, -1):
            status = mscomm.Status()
            obj = mscomm.recv_object(mscomm.ANY_SOURCE, mscomm.ANY_TAG, status=status)
            assert obj == f"from {status.source}" and (status.tag, status.count) == (10 + status.source, 1), left
    else:
        for _ in range(10):
            mscomm.send_object(f"from {rank}", 0, tag=10 + rank)
        tell(f"rank {rank} has sent")


@ranks(2)
def test_a_header_that_no_send_object_has_sent_is_refused_by_name(rank, group):
    world = resolve(None)
    if rank == 0:
        world.send(1, 0, _core.object_dtype, np.full(16, 255, np.uint8), 10)
    else:
        with pytest.raises(ValueError, match="rank 0 sent an invalid object header: ff"):
            mscomm.recv_object(0)


@ranks(2)
def test_threads_send_and_receive_objects_under_one_tag(rank, group):
    others = [[] for _ in range(3)]

    def talk(i: int) -> None:
        for turn in range(40):
            if rank == 0:
                mscomm.send_object((i, turn, bytes(i * 20_000)), 1, tag=9)
            else:
                others[i].append(mscomm.recv_object(0, tag=9))

    threads = [threading.Thread(target=talk, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if rank == 1:
        came = sorted(
            (i, turn) for i, turn, data in (one for other in others for one in other) if data == bytes(i * 20_000)
        )
        assert came == [(i, turn) for i in range(3) for turn in range(40)]


@pytest.mark.parametrize("count", [3, 16])  # 16, because the header of an object has 16 bytes
@pytest.mark.parametrize("object_side", [0, 1])
@ranks(2)
def test_an_object_and_an_array_are_never_taken_for_each_other(rank, group, object_side, count):
    expected, sent = ("object x 16", f"uint8 x {count}") if object_side == 1 else (f"uint8 x {count}", "object x 16")
    with pytest.raises(mscomm.Mismatch, match=f"expects {expected}, rank 0 sent {sent}"):
        if rank == 0:
            mscomm.send_object([1], 1) if object_side == 0 else mscomm.send(np.zeros(count, np.uint8), 1)
            mscomm.recv_object(1)
        elif object_side == 0:
            mscomm.recv(np.empty(count, np.uint8), 0)
        else:
            mscomm.recv_object(0)


@ranks(2)
def test_an_object_that_one_rank_cannot_read_breaks_nothing(rank, group):
    if rank == 0:
        mscomm.register_object(Unknown)
    calls = [
        lambda obj, **options: mscomm.broadcast_object(obj, **options),
        lambda obj, **options: mscomm.all_gather_object(obj, **options)[0],
        lambda obj, **options: mscomm.scatter_object([0, obj], **options),
        lambda obj, **options: mscomm.send_object(obj, 1, **options) if rank == 0 else mscomm.recv_object(0, **options),
    ]
    for call in calls:
        if rank == 0:
            call(Unknown(1))
            call(Fraction(1, 3), allow_pickle=True)
            call(Fraction(1, 3), allow_pickle=True)
        else:
            with pytest.raises(mscomm.Error, match=r"not registered here, '.*\.Unknown': call mscomm\.register_object"):
                call(None)
            with pytest.raises(mscomm.Error, match=r"Fraction was received as a pickle.* pass allow_pickle=True"):
                call(None)
            assert call(None, allow_pickle=True) == Fraction(1, 3)
    assert mscomm.all_gather_object(rank) == [0, 1]


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed")
@ranks(2)
def test_a_tensor_of_a_library_that_is_not_here_is_named(rank, group):
    if rank == 1:
        sys.modules["torch"] = None  # as if PyTorch were not installed
        with pytest.raises(TypeError, match="received a tensor of torch, which this rank cannot import"):
            mscomm.broadcast_object(None)
    else:
        import torch

        assert mscomm.broadcast_object(torch.ones(2)).tolist() == [1, 1]
    assert mscomm.all_gather_object(rank) == [0, 1]


@ranks(2)
def test_broadcast_object_looks_at_the_roots_object_alone(rank, group):
    assert mscomm.broadcast_object(len if rank == 0 else (1,), root=1) == (1,)


@ranks(2)
def test_results_are_new_objects_on_every_rank(rank, group):
    mine = [rank]
    mscomm.all_gather_object(mine)[rank].append("changed")
    mscomm.broadcast_object(mine, root=0).append("changed")
    assert mine == [rank]


@ranks(2)
def test_an_object_that_one_rank_cannot_send_breaks_nothing(rank, group):
    number = resolve(None).core.where()[0]
    with pytest.raises(TypeError, match=r"obj\[0\]: an? "):
        mscomm.all_gather_object([len] if rank == 0 else [object()])
    if rank == 1:
        with pytest.raises(TypeError, match="obj: an object"):
            mscomm.broadcast_object(object(), root=1)
    assert resolve(None).core.where()[0] == number
    assert mscomm.all_gather_object(rank) == [0, 1]


@ranks(2, expect={0: 3})
def test_a_rank_that_cannot_send_and_ends_is_named_to_the_others(rank, group):
    if rank == 0:
        try:
            mscomm.all_gather_object(len)
        except TypeError:
            os._exit(3)
    with pytest.raises(mscomm.PeerLost, match="rank 0"):
        mscomm.all_gather_object(1)


@ranks(2)
def test_a_rank_that_others_wait_for_in_vain_is_named_when_the_time_is_up(rank, group):
    if rank == 0:
        with pytest.raises(mscomm.CollectiveTimeout) as caught:
            mscomm.all_gather_object(1, timeout=datetime.timedelta(seconds=0.3))
        assert caught.value.waiting_for == (1,)
    else:
        while resolve(None).core.failure() is None:
            time.sleep(0.01)
        with pytest.raises(mscomm.CollectiveTimeout):
            mscomm.all_gather_object(1)


@pytest.mark.parametrize("name", ["all_gather", "broadcast"])
def test_the_time_limit_is_for_both_exchanges_together(name, monkeypatch):
    limits = []

    def slow(self: Group, call: Any, seconds: float, number: int) -> None:
        limits.append(seconds)
        time.sleep(0.05)
        run(self, call, seconds, number)

    run = Group.run
    monkeypatch.setattr(Group, "run", slow)
    mscomm.init()
    try:
        getattr(mscomm, f"{name}_object")(1, timeout=100)
        getattr(mscomm, f"{name}_object")(1, timeout=datetime.timedelta(seconds=0.01))
    finally:
        mscomm.release()
    assert limits[0] == 100
    assert 50 < limits[1] <= 99.95
    # In the second call, no time is left after the first exchange. The second exchange still gets a moment, so that it
    # can report the timeout.
    assert 0 < limits[3] < 0.01


@pytest.mark.parametrize("function", [mscomm.all_gather_object, mscomm.broadcast_object])
def test_a_time_limit_of_nothing_is_refused(function):
    mscomm.init()
    try:
        with pytest.raises(ValueError, match="not more than 0"):
            function(1, timeout=0)
    finally:
        mscomm.release()


@pytest.mark.parametrize("root", [1, -1, "0", None, 0.0], ids=repr)
def test_a_root_that_is_no_rank_is_refused(root):
    mscomm.init()
    try:
        with pytest.raises((TypeError, ValueError), match="root"):
            mscomm.broadcast_object(1, root)
    finally:
        mscomm.release()


def test_a_job_of_one_gets_its_own_object_back():
    mscomm.init()
    try:
        assert mscomm.all_gather_object({1: (2,)}) == [{1: (2,)}]
        assert mscomm.broadcast_object({1: (2,)}, root=np.int64(0)) == {1: (2,)}
    finally:
        mscomm.release()


@pytest.mark.parametrize("function", [mscomm.all_gather_object, mscomm.broadcast_object])
def test_before_init_the_functions_say_what_to_do(function):
    with pytest.raises(RuntimeError, match=r"mscomm\.init\(\)"):
        function(1)
