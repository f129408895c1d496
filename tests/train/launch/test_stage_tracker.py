from __future__ import annotations

import os

import pytest

from dgl_mgpu.train.launch.hangs import Heartbeats
from dgl_mgpu.utils.stages import StageTracker, stage, stage_of


def test_an_error_knows_the_stage_it_comes_from():
    with pytest.raises(KeyError) as failure, StageTracker(), stage("evaluate"):
        with stage("sample"):
            pass
        with stage("load"), stage("gather"):
            raise KeyError
    assert stage_of(failure.value) == " in stage gather of load of evaluate"
    with pytest.raises(KeyError) as failure, StageTracker(), stage("forward"):
        with pytest.raises(ValueError), stage("gather"):
            raise ValueError
        raise KeyError
    assert stage_of(failure.value) == " in stage forward"
    with pytest.raises(KeyError) as failure, StageTracker():
        raise KeyError
    assert stage_of(failure.value) == ""


def test_others_see_the_stage_a_process_is_in_and_its_workers_do_not_change_it():
    shown = Heartbeats(1).ranks[0]
    assert shown.last_stage() == ""
    with StageTracker(shown):
        assert shown.last_stage() == ""
        with stage("evaluate"):
            with stage("gather"):
                assert shown.last_stage() == " in stage gather of evaluate"
            assert shown.last_stage() == " in stage evaluate"
            worker = os.fork()
            if not worker:
                stage("sample").__enter__()
                os._exit(0)
            os.waitpid(worker, 0)
            assert shown.last_stage() == " in stage evaluate"
        assert shown.last_stage() == ""
        with stage("x" * 200):
            assert shown.last_stage() == " in stage " + "x" * 80
    with stage("forward"):
        assert shown.last_stage() == ""
