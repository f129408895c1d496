"""What a thread says of graphs on the CPU, and what others hear of it."""

from __future__ import annotations

import threading

import torch

from dgl_mgpu.graph.dispatch import is_passed_as_tensor, tensor_backed_graphs


def test_a_thread_that_ends_late_changes_nothing_for_others():
    """Threads that sample ahead are still at it when the graphs they sample are given up."""
    rows = torch.zeros(1)
    inside, end = threading.Event(), threading.Event()
    stays = []

    def work() -> None:
        stays.append(is_passed_as_tensor(rows))
        with tensor_backed_graphs(False):
            stays.append(is_passed_as_tensor(rows))
            inside.set()
            end.wait(60)
        stays.append(is_passed_as_tensor(rows))

    thread = threading.Thread(target=work)
    with tensor_backed_graphs():
        thread.start()
        assert inside.wait(60) and is_passed_as_tensor(rows)
    end.set()
    thread.join(60)
    assert stays == [True, False, False] and not is_passed_as_tensor(rows)


def test_uses_may_end_in_any_order():
    rows = torch.zeros(1)
    first, second = tensor_backed_graphs(), tensor_backed_graphs()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert is_passed_as_tensor(rows)
    second.__exit__(None, None, None)
    assert not is_passed_as_tensor(rows)
