#!/usr/bin/env python3
"""Runs MindSpore's own Ascend backend over the emulated CANN: tensors there and back, aclnnAddLora in every mode.

    try_mindspore.py BUILD_DIR      builds what is missing, then runs itself in the environment that is needed
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

SCALARS = {"layer_idx": 1, "scale": 0.5, "y_offset": 16}


def outside(build_dir):
    import generate_stubs

    started = time.perf_counter()
    environment = {**os.environ, **generate_stubs.prepare(build_dir), "GLOG_v": "4", "EMU_TRY_BUILD_DIR": str(build_dir)}
    print(f"emulated CANN and stubs: {time.perf_counter() - started:.1f} s")
    work = Path(build_dir) / "try_mindspore"
    work.mkdir(exist_ok=True)
    # MindSpore drops files into the current folder.
    return subprocess.run([sys.executable, str(Path(__file__).resolve()), "--inside"], env=environment, cwd=work).returncode


class Report:
    failed = 0

    def check(self, name, holds):
        self.failed += not holds
        print(f"{'ok  ' if holds else 'FAIL'} {name}", flush=True)


def inside():
    import mindspore as ms
    import numpy as np
    from mindspore import mint, mutable, nn

    import emulated_cann
    import extension
    import test_emulator
    from graph_add_lora import build_inference, make_add_lora

    build_dir = Path(os.environ["EMU_TRY_BUILD_DIR"])
    control = emulated_cann.Control(build_dir)
    report = Report()
    check = report.check
    ms.set_device("Ascend", 0)
    as_tensors = lambda data: {name: None if each is None else ms.Tensor(each) for name, each in data.items()}
    same = lambda tensor, array: bool(np.array_equal(tensor.asnumpy(), array))
    names = ("y", "x", "weight_b", "indices", "weight_a")
    flat = (1, 0.5, 16, 16)

    there = ms.Tensor(np.arange(12, dtype=np.float16).reshape(3, 4))
    check("tensors go there and back", same(there + there, 2 * np.arange(12, dtype=np.float16).reshape(3, 4)))

    data = test_emulator.operands(indices=[0, -1, 3])
    tensors = as_tensors(data)
    wanted = test_emulator.expected(**data, **SCALARS)
    arguments = [tensors[name] for name in names]
    add_lora = make_add_lora()

    class Model(nn.Cell):
        def construct(self, y, x, weight_b, indices, weight_a):
            result = add_lora(y, x, weight_b, indices, weight_a, 1, 0.5, 16, 16)
            return result, y * 1.0

    class Chain(nn.Cell):
        def construct(self, y, x, weight_b, indices, weight_a):
            first = add_lora(y, x, weight_b, indices, weight_a, 1, 0.5, 16, 16)
            return first, add_lora(first, x, weight_b, indices, weight_a, 0, 2.0, 0, 16)

    twice = test_emulator.expected(**{**data, "y": wanted}, layer_idx=0, scale=2.0, y_offset=0)
    ms.set_context(mode=ms.GRAPH_MODE)
    for level in ("default", "O0", "O1"):
        if level != "default":
            ms.set_context(jit_config={"jit_level": level})
        result, other = Model()(*arguments)
        check(f"GRAPH_MODE, jit_level {level}", same(result, wanted) and same(other, data["y"]))
        first, second = Chain()(*arguments)
        check(f"GRAPH_MODE, jit_level {level}, two in a chain", same(first, wanted) and same(second, twice))

    dynamic = make_add_lora(build_inference(build_dir))

    class Dynamic(nn.Cell):
        def construct(self, y, x, weight_b, indices, weight_a, layer_idx, scale, y_offset, y_slice_size):
            return dynamic(y, x, weight_b, indices, weight_a, layer_idx, scale, y_offset, y_slice_size)

    def with_dynamic_batch(model):
        model.set_inputs(
            ms.Tensor(shape=[None, 48], dtype=ms.float16), ms.Tensor(shape=[None, 32], dtype=ms.float16),
            tensors["weight_b"], ms.Tensor(shape=[None], dtype=ms.int32), tensors["weight_a"],
            mutable(1), mutable(0.5), mutable(16), mutable(16))
        return model

    model = with_dynamic_batch(Dynamic())
    dynamic_cases = ((3, flat), (5, (0, 0.1, 0, 16)), (0, flat))
    for batch, scalars in dynamic_cases:
        other_data = test_emulator.operands(b=batch)
        result = model(*(as_tensors(other_data)[name] for name in names), *map(mutable, scalars))
        layer_idx, scale, y_offset, _ = scalars
        check(f"GRAPH_MODE, dynamic batch {batch}, scalars {scalars}",
              same(result, test_emulator.expected(**other_data, layer_idx=layer_idx, scale=scale, y_offset=y_offset)))
    ms.set_context(mode=ms.PYNATIVE_MODE)

    jitted = ms.jit(add_lora)
    check("ms.jit", same(jitted(*arguments, *flat), wanted) and same(tensors["y"], data["y"]))
    jitted = ms.jit(dynamic)
    check("ms.jit, inference in C++", same(jitted(*arguments, *flat), wanted))

    started = time.perf_counter()
    module, operator = extension.load()
    print(f"extension: {time.perf_counter() - started:.1f} s to build and load")
    ordered = [tensors[name] for name in names[:4]] + [*flat, tensors["weight_a"]]
    bare = test_emulator.operands(with_a=False)
    bare_tensors = as_tensors(bare)
    bare_ordered = [bare_tensors[name] for name in names[:4]] + [*flat]
    bare_wanted = test_emulator.expected(**bare, **SCALARS)

    check("extension, PyNative", same(operator(*ordered), wanted) and same(tensors["y"], data["y"]))
    check("extension, PyNative, weight_a=None", same(operator(*bare_ordered), bare_wanted))
    accumulated = mint.clone(tensors["y"])
    module.add_lora_(accumulated, *ordered[1:])
    check("extension, PyNative, in place", same(accumulated, wanted))
    wide = ms.Tensor(np.concatenate([data["x"], data["x"]], axis=1))[:, :32]
    result = operator(ordered[0], wide, *ordered[2:])
    check("extension, PyNative, strided x", same(result, wanted) and not wide.is_contiguous())
    try:
        operator(ordered[0], tensors["x"].astype(ms.float32), *ordered[2:]).asnumpy()
        check("extension, PyNative, wrong dtype is an error with CANN's text", False)
    except RuntimeError as error:
        check("extension, PyNative, wrong dtype is an error with CANN's text", "E161002" in str(error))
    check("extension, PyNative, after an error", same(operator(*ordered), wanted))

    class OneOperator(nn.Cell):
        def construct(self, y, x, weight_b, indices, weight_a):
            return operator(y, x, weight_b, indices, 1, 0.5, 16, 16, weight_a), y * 1.0

    class WithoutA(nn.Cell):
        def construct(self, y, x, weight_b, indices):
            return operator(y, x, weight_b, indices, 1, 0.5, 16, 16)

    class Views(nn.Cell):
        def construct(self, y, x, weight_b, indices, weight_a):
            return operator(
                mint.narrow(y, 1, 0, 48), mint.narrow(x, 1, 0, 32), weight_b, indices, 1, 0.5, 16, 16, weight_a)

    class CustomViews(nn.Cell):
        def construct(self, y, x, weight_b, indices, weight_a):
            # Without contiguous(): 561000. y needs none, it is cloned.
            return add_lora(
                mint.narrow(y, 1, 0, 48), mint.narrow(x, 1, 0, 32).contiguous(), weight_b, indices, weight_a, 1, 0.5, 16,
                16)

    class DynamicOperator(nn.Cell):
        def construct(self, y, x, weight_b, indices, weight_a, layer_idx, scale, y_offset, y_slice_size):
            return operator(y, x, weight_b, indices, layer_idx, scale, y_offset, y_slice_size, weight_a)

    @ms.jit
    def jitted_operator(y, x, weight_b, indices, weight_a):
        return operator(y, x, weight_b, indices, 1, 0.5, 16, 16, weight_a)

    check("extension, ms.jit", same(jitted_operator(*arguments), wanted))
    ms.set_context(mode=ms.GRAPH_MODE)
    result, other = OneOperator()(*arguments)
    check("extension, GRAPH_MODE", same(result, wanted) and same(other, data["y"]) and same(tensors["y"], data["y"]))
    wide_y, wide_x = (ms.Tensor(np.concatenate([data[name], data[name]], axis=1)) for name in ("y", "x"))
    check("extension, GRAPH_MODE, views as inputs",
          same(Views()(wide_y, wide_x, *arguments[2:]), wanted) and control.misuse() == 0)
    check("ops.Custom, GRAPH_MODE, views as inputs",
          same(CustomViews()(wide_y, wide_x, *arguments[2:]), wanted) and control.misuse() == 0)
    check("extension, GRAPH_MODE, weight_a=None", same(WithoutA()(*bare_ordered[:4]), bare_wanted))
    model = with_dynamic_batch(DynamicOperator())
    for batch, scalars in dynamic_cases:
        other_data = test_emulator.operands(b=batch)
        layer_idx, scale, y_offset, _ = scalars
        result = model(*(as_tensors(other_data)[name] for name in names), *map(mutable, scalars))
        check(f"extension, GRAPH_MODE, dynamic batch {batch}, scalars {scalars}",
              same(result, test_emulator.expected(**other_data, layer_idx=layer_idx, scale=scale, y_offset=y_offset)))
    ms.set_context(mode=ms.PYNATIVE_MODE)

    clean = control.misuse() == 0
    check("nothing was used wrongly", clean)
    if not clean:
        print("\n".join(control.misuse_log()))
    above = ms.Tensor(np.array([0, 9, 3], np.int32))
    result = operator(*ordered[:3], above, *ordered[4:])
    check("a missing guard against an index above W shows", not same(result[:1], wanted[:1]) and control.misuse() == 1)

    check("the operator came from libopapi_math.so",
          control.last_library("aclnnAddLora").endswith("libopapi_math.so"))
    return report.failed


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("build_dir", nargs="?", default="build")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.exit(inside() if options.inside else outside(Path(options.build_dir).resolve()))


if __name__ == "__main__":
    main()
