"""Launches that repeat one: what is compared, and that Triton is asked in every other case."""

from __future__ import annotations

import pytest
import torch

from codesign.kernels import triton_launch
from codesign.kernels.triton_launch import launch


class Kernel:
    """Notes how it is launched: by Triton's own launch, or as compiled before."""

    def __init__(self) -> None:
        self.asked, self.repeated = [], []
        self.refuses = False

    def __getitem__(self, grid):
        def run(*args, **options):
            self.asked.append((grid, args, options))
            return self.compiled(len(self.asked))

        return run

    def compiled(self, number: int):
        kept = self

        class Compiled:
            def __getitem__(self, grid):
                def run(*args, stream):
                    if kept.refuses:
                        raise TypeError("another number of arguments")
                    kept.repeated.append((number, grid, args, stream))

                return run

        return Compiled()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    """A device that is current; its stream has its number."""
    current = [0]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda d: 7 + d, raising=False)
    monkeypatch.setattr(triton_launch, "_compiled", {})
    return current


def test_a_launch_that_repeats_one_takes_its_machine_code(gpu):
    kernel, first, second = Kernel(), torch.zeros(8), torch.ones(8)
    launch(kernel, (1, 2, 3), first, 16, True, num_warps=4)
    launch(kernel, (4, 5, 6), second, 16, True, num_warps=4)
    assert kernel.asked == [((1, 2, 3), (first, 16, True), {"num_warps": 4})]
    ((number, grid, args, stream),) = kernel.repeated
    assert (number, grid, stream) == (1, (4, 5, 6), 7)
    assert args[0] is second
    assert args[1:] == (16, True)


@pytest.mark.parametrize(
    ("args", "options"),
    [
        ((torch.zeros(8), 17, True), {"num_warps": 4}),
        ((torch.zeros(8), 16, False), {"num_warps": 4}),
        ((torch.zeros(8), 16, True), {"num_warps": 8}),
        ((torch.zeros(8, dtype=torch.float64), 16, True), {"num_warps": 4}),
    ],
)
def test_another_number_constant_option_or_type_is_another_launch(gpu, args, options):
    kernel = Kernel()
    launch(kernel, (1, 1, 1), torch.zeros(8), 16, True, num_warps=4)
    launch(kernel, (1, 1, 1), *args, **options)
    assert len(kernel.asked) == 2
    launch(kernel, (1, 1, 1), *args, **options)
    assert [number for number, *_ in kernel.repeated] == [2]


def test_every_device_and_kernel_has_its_own_machine_code(gpu):
    kernel, other = Kernel(), Kernel()
    for gpu[0] in (0, 1, 1, 0):
        launch(kernel, (1, 1, 1), torch.zeros(8), num_warps=4)
    launch(other, (1, 1, 1), torch.zeros(8), num_warps=4)
    assert [(number, stream) for number, _, _, stream in kernel.repeated] == [(2, 8), (1, 7)]
    assert len(other.asked) == 1


def test_pointers_that_are_not_aligned_are_left_to_triton(gpu):
    kernel, odd = Kernel(), torch.zeros(9)[1:]
    for _ in range(2):
        launch(kernel, (1, 1, 1), torch.zeros(8), num_warps=4)
        launch(kernel, (1, 1, 1), odd, num_warps=4)
    assert len(kernel.asked) == 3
    assert all(args[0] is not odd for _, _, args, _ in kernel.repeated)


def test_a_triton_that_launches_otherwise_is_asked_every_time(gpu):
    kernel = Kernel()
    kernel.refuses = True
    for _ in range(4):
        launch(kernel, (1, 1, 1), torch.zeros(8), num_warps=4)
    assert len(kernel.asked) == 4
    assert triton_launch._compiled == dict.fromkeys(triton_launch._compiled)
