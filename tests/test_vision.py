"""Operations on images and other columns, compared with NumPy, Pillow and PyTorch."""

from __future__ import annotations

import importlib
import inspect
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from images import image

import mscomm
import mscomm.dataset as ds
from mscomm.dataset import draws, transforms, vision
from mscomm.dataset.operation import Operation

PADDINGS = [0, None, 3, (2, 5), (1, 2, 3, 4)]


@pytest.mark.parametrize("padding", PADDINGS, ids=repr)
@pytest.mark.parametrize("border", vision.Border)
@pytest.mark.parametrize("channels", [None, 1, 3])
def test_random_crop_gives_each_window_of_the_padded_image(padding, border, channels):
    x = image(9, 8, channels)
    left, top, right, bottom = {0: (0,) * 4, None: (0,) * 4, 3: (3,) * 4, (2, 5): (2, 5, 2, 5)}.get(padding, padding)
    padded = np.pad(x, [(top, bottom), (left, right), (0, 0)][: x.ndim], mode=border.value)
    windows = {
        padded[i : i + 7, j : j + 6].tobytes()
        for i in range(padded.shape[0] - 7 + 1)
        for j in range(padded.shape[1] - 6 + 1)
    }
    crop = vision.RandomCrop((7, 6), padding, padding_mode=border)
    came = {crop.apply(x, int(draw)).tobytes() for draw in draws.bits(3, np.arange(len(windows) * 12))}
    assert came == windows


def test_random_crop_fills_and_pads_if_needed():
    x = np.zeros((2, 4, 3), np.uint8)
    filled = vision.RandomCrop((6, 8), 2, fill_value=(1, 2, 3))(x)
    assert filled[0, 0].tolist() == [1, 2, 3] and filled[3, 4].tolist() == [0, 0, 0]
    assert vision.RandomCrop(5, pad_if_needed=True)(x).shape == (5, 5, 3)
    with pytest.raises(ValueError, match="2 x 4 pixels after padding, the size is 5 x 5; give more padding"):
        vision.RandomCrop(5)(x)
    with pytest.raises(ValueError, match="fill_value has 2 numbers"):
        vision.RandomCrop(5, 4, fill_value=(1, 2))(x)


def test_random_flip_flips_as_often_as_it_says():
    x = image(4, 5)
    flip = vision.RandomHorizontalFlip(0.25)
    came = [flip.apply(x, int(draw)) for draw in draws.bits(5, np.arange(4000))]
    flipped = sum(np.array_equal(one, x[:, ::-1]) for one in came)
    assert all(np.array_equal(one, x) or np.array_equal(one, x[:, ::-1]) for one in came)
    assert abs(flipped / 4000 - 0.25) < 0.035  # the bound is 5 standard deviations
    assert np.array_equal(vision.RandomHorizontalFlip(0)(x), x)
    assert np.array_equal(vision.RandomHorizontalFlip(1)(x), x[:, ::-1])


@pytest.mark.parametrize("operation", [vision.RandomCrop(4, 3), vision.RandomHorizontalFlip()], ids=repr)
def test_a_random_operation_called_by_itself_draws_anew_each_time(operation):
    x = image(4, 4)
    assert len({operation(x).tobytes() for _ in range(40)}) > 1


def bilinear(x: np.ndarray, n: int, axis: int) -> np.ndarray:
    """Resize x to n pixels along axis. The weights form a triangle. Half of its base is as long as an old pixel or a
    new one, whichever is larger.
    """
    old = x.shape[axis]
    scale = old / n
    centres = (np.arange(n)[:, None] + 0.5) * scale
    weights = np.maximum(0, 1 - abs(np.arange(old) + 0.5 - centres) / max(scale, 1))
    weights /= weights.sum(axis=1, keepdims=True)
    return np.moveaxis(np.tensordot(weights, x, (1, axis)), 0, axis)


SIZES = [(64, 48), (20, 24), (11, 50), 40, 16]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("channels", [None, 1, 2, 3])
def test_resize_is_bilinear_with_antialias(size, dtype, channels):
    x = image(32, 40, channels, dtype)
    got = vision.Resize(size)(x)
    height, width = size if isinstance(size, tuple) else (size, size * 40 // 32)
    assert (got.dtype, got.shape) == (x.dtype, (height, width, *x.shape[2:]))
    want = bilinear(bilinear(x.astype(np.float64), width, 1), height, 0)
    # Like Pillow, Resize rounds uint8 after each of its two passes. So a value may differ by 1.
    assert abs(got - want).max() <= (1.01 if dtype == np.uint8 else 1e-4)


def test_resize_to_a_larger_size_weighs_only_the_two_nearest_pixels():
    x = np.zeros((1, 4, 1), np.float32)
    x[0, 1] = 80
    assert vision.Resize((1, 8))(x).ravel().tolist() == [0, 20, 60, 60, 20, 0, 0, 0]


@pytest.mark.long
@pytest.mark.parametrize("size", SIZES)
def test_resize_is_torchs(size):
    torch = pytest.importorskip("torch")
    x = image(32, 40, 3, np.float32)
    got = vision.Resize(size)(x)
    planes = torch.from_numpy(x).permute(2, 0, 1)[None]
    want = torch.nn.functional.interpolate(planes, got.shape[:2], mode="bilinear", antialias=True)[0]
    assert abs(got - want.permute(1, 2, 0).numpy()).max() < 1e-3


@pytest.mark.parametrize("inter", vision.Inter)
def test_resize_is_pillows(inter):
    from PIL import Image

    x = image(32, 20)
    want = np.asarray(Image.fromarray(x).resize((15, 50), getattr(Image.Resampling, inter.value)))
    assert np.array_equal(vision.Resize((50, 15), inter)(x), want)
    assert vision.Resize((32, 20))(x) is x


def test_resize_without_pillow_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r"Resize needs Pillow: pip install pillow"):
        vision.Resize(3)(image(4, 4))
    assert vision.Resize(8)(image(4, 4)).shape == (8, 8, 3)  # Resize enlarges uint8 images with NumPy, not Pillow


@given(
    old=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    more=st.tuples(st.integers(0, 200), st.integers(0, 200)),
    channels=st.sampled_from([None, 1, 2, 3, 4]),
    planar=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_larger_images_have_pillows_bits(old, more, channels, planar):
    from PIL import Image

    rows = np.stack([image(*old, channels), 255 - image(*old, channels)])
    rows[0, 0], rows[1, -1] = 255, 0
    if planar and channels:
        rows = np.ascontiguousarray(rows.transpose(0, 3, 1, 2)).transpose(0, 2, 3, 1)
    size = (old[0] + more[0], old[1] + more[1])
    got = vision.Resize(size).on_rows(rows)
    assert got.shape == (2, *size, *rows.shape[3:]) and got.dtype == np.uint8
    for one, row in zip(got, rows, strict=True):
        planes = [row] if channels is None else [row[:, :, channel] for channel in range(channels)]
        pictures = [Image.fromarray(np.ascontiguousarray(plane)) for plane in planes]
        want = [np.asarray(picture.resize(size[::-1], Image.Resampling.BILINEAR)) for picture in pictures]
        assert np.array_equal(one, want[0] if channels is None else np.dstack(want))


def test_resize_takes_no_other_dtype():
    with pytest.raises(TypeError, match="the image is float64; expected uint8 or float32"):
        vision.Resize(8)(np.zeros((4, 4)))


@pytest.mark.parametrize("shape", [(), (5,), (4, 6, 3), (2, 4, 6, 3)])
@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.float32, np.float64])
def test_rescale_is_a_product_and_a_sum_in_float32(shape, dtype):
    x = (np.random.default_rng(1).random(shape) * 255).astype(dtype)
    kept = np.array(x)
    got = vision.Rescale(1.0 / 255.0, -0.5)(x)
    want = np.asarray(x, np.float32) * np.float32(1 / 255) + np.float32(-0.5)
    assert got.dtype == np.float32 and np.array_equal(got, want) and np.array_equal(x, kept)


@pytest.mark.parametrize("is_hwc", [True, False])
@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_normalize_is_by_channel(is_hwc, batch, dtype):
    mean, std = (0.4465, 0.4822, 0.4914), (0.2010, 0.1994, 0.2023)
    x = image(6 * 2, 5, 3, dtype).reshape(*batch, -1, 5, 3)
    want = (x.astype(np.float64) - mean) / std
    given_x = x if is_hwc else np.moveaxis(x, -1, -3)
    got = vision.Normalize(mean, std, is_hwc)(given_x)
    got = got if is_hwc else np.moveaxis(got, -3, -1)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=3e-7)


@pytest.mark.parametrize("shape", [(2, 3, 5, 3), (1, 224, 7, 3), (2, 40, 200, 3), (3, 8, 8, 1), (0, 4, 4, 3)])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 3, 1, 2), (1, 0, 3, 2), (3, 2, 1, 0)])
def test_normalize_has_the_bits_of_the_formula_whatever_the_order_in_memory(shape, order):
    x = np.random.default_rng(0).random(shape, np.float32)
    x = np.ascontiguousarray(x.transpose(order)).transpose(np.argsort(order))
    mean, std = (0.4465, 0.4822, 0.4914)[: shape[-1]], (0.2010, 0.1994, 0.2023)[: shape[-1]]
    want = (x - np.array(mean, np.float32)) / np.array(std, np.float32)
    for got in (vision.Normalize(mean, std)(x), vision.Normalize(mean, std).on_rows(x)):
        assert got.dtype == np.float32 and np.array_equal(got, want)
    channels_first = vision.Normalize(mean, std, is_hwc=False)(x.transpose(0, 3, 1, 2))
    assert np.array_equal(channels_first, want.transpose(0, 3, 1, 2))


def test_hwc2chw_moves_the_channels():
    x = image(4, 5, 3)
    assert np.array_equal(vision.HWC2CHW()(x), x.transpose(2, 0, 1))
    assert np.array_equal(vision.HWC2CHW()(x[None]), x.transpose(2, 0, 1)[None])


@pytest.mark.parametrize("dtype", [np.int32, "float16", mscomm.float32, bool, np.dtype("u2")], ids=str)
def test_type_cast_is_astype(dtype):
    x = np.array([[0, 1.75, 200]])
    got = transforms.TypeCast(dtype)(x)
    assert got.dtype == np.dtype(dtype) and np.array_equal(got, x.astype(dtype))


@pytest.mark.parametrize("library", ["torch", "mindspore"])
@pytest.mark.parametrize("name", ["bool", "int32", "float16", "float64", "bfloat16"])
def test_a_dtype_may_be_another_librarys(library, name):
    given = getattr(pytest.importorskip(library), {"bool": "bool_"}.get(name, name) if library == "mindspore" else name)
    kind = transforms.TypeCast(given)(np.array([0.0, 2.75])).dtype
    assert kind.name == name and mscomm.zeros(3, dtype=given).dtype == kind


@pytest.mark.parametrize(
    ("make", "arguments", "kind"),
    [
        (vision.RandomCrop, (0,), ValueError),
        (vision.RandomCrop, ((1, 2, 3),), ValueError),
        (vision.RandomCrop, (2.5,), TypeError),
        (vision.RandomCrop, (True,), TypeError),
        (vision.RandomCrop, (4, -1), ValueError),
        (vision.RandomCrop, (4, (1, 2, 3)), ValueError),
        (vision.RandomCrop, (4, 0.5), TypeError),
        (vision.RandomCrop, (4, 1, 1), TypeError),
        (vision.RandomCrop, (4, 1, False, 256), ValueError),
        (vision.RandomCrop, (4, 1, False, 0.5), TypeError),
        (vision.RandomCrop, (4, 1, False, 0, "edge"), TypeError),
        (vision.RandomHorizontalFlip, (1.5,), ValueError),
        (vision.RandomHorizontalFlip, ("0.5",), TypeError),
        (vision.Resize, (0,), ValueError),
        (vision.Resize, ("8",), TypeError),
        (vision.Resize, (8, "BILINEAR"), TypeError),
        (vision.Rescale, ("1", 0), TypeError),
        (vision.Rescale, (1, None), TypeError),
        (vision.Normalize, (0.5, 0.5), TypeError),
        (vision.Normalize, ((0.5,), ("x",)), TypeError),
        (vision.Normalize, ((0.5, 0.5), (0.5,)), ValueError),
        (vision.Normalize, ((0.5,), (0,)), ValueError),
        (vision.Normalize, ((256,), (1,)), ValueError),
        (vision.Normalize, ((0.5,), (0.5,), 1), TypeError),
        (transforms.TypeCast, ("nothing",), TypeError),
        (transforms.TypeCast, (None,), TypeError),
    ],
)
def test_an_operation_refuses_arguments_that_make_no_sense(make, arguments, kind):
    with pytest.raises(kind, match=f"{make.__name__}: "):
        make(*arguments)


EXAMPLES = {
    "RandomCrop": (4,),
    "RandomHorizontalFlip": (),
    "Resize": (8,),
    "Rescale": (2.0, 0.0),
    "Normalize": ((0.5,) * 3, (0.5,) * 3),
    "HWC2CHW": (),
    "TypeCast": (np.int32,),
}
OPERATIONS = {
    name: thing
    for module in (vision, transforms)
    for name, thing in vars(module).items()
    if inspect.isclass(thing) and issubclass(thing, Operation)
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_leaves_its_input_alone_and_says_where_it_failed(name):
    operation = OPERATIONS[name](*EXAMPLES[name])
    x = image(6, 7)
    kept = x.copy()
    operation(x)
    assert np.array_equal(x, kept)
    bad = [(np.array(["text"]),)]
    with pytest.raises(RuntimeError, match=rf"map of x: {name} on row 0 of the source"):
        list(ds.GeneratorDataset(bad, "x").map(operation))


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("channels", [None, 3])
@pytest.mark.parametrize("size", [(6, 7), (12, 20)])
def test_rows_together_have_the_bits_of_each_by_itself(name, channels, size):
    if channels is None and name in ("Normalize", "HWC2CHW"):
        pytest.skip("this operation needs an image with channels")
    operation = OPERATIONS[name](*EXAMPLES[name])
    rows = np.stack([image(*size, channels), 255 - image(*size, channels), image(*size, channels)[::-1]])
    drawn = draws.bits(9, [1, 2, 3]).tolist()
    kept = rows.copy()
    together = operation.on_rows(rows, drawn)
    for which, row in enumerate(rows):
        alone = operation.apply(row, drawn[which]) if hasattr(operation, "apply") else operation(row)
        assert together[which].dtype == alone.dtype and np.array_equal(together[which], alone)
    assert np.array_equal(rows, kept)


@pytest.mark.parametrize("module", ["vision", "transforms"])
def test_the_older_module_paths_have_the_same_names(module):
    newer, older = (importlib.import_module(f"mscomm.dataset.{module}{end}") for end in ("", ".c_transforms"))
    public = {name: thing for name, thing in vars(newer).items() if inspect.isclass(thing)}
    assert public and {name: thing for name, thing in vars(older).items() if inspect.isclass(thing)} == public


def test_the_dtypes_are_numpys_under_every_path():
    from mscomm import dtype as mstype
    from mscomm.common import dtype as older

    names = [
        name
        for name in vars(mstype)
        if not name.startswith("_") and name not in ("annotations", "Any", "TYPE_CHECKING")
    ]
    assert len(names) == 14
    for name in names:
        assert getattr(older, name) is getattr(mscomm, name) is getattr(mstype, name) is getattr(np, name)
    assert older.bfloat16 is mstype.bfloat16 is pytest.importorskip("ml_dtypes").bfloat16


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_has_an_example(name):
    assert ">>>" in inspect.getdoc(OPERATIONS[name])
