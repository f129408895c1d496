from __future__ import annotations

import os

import pytest

from dgl_mgpu.pipeline.stage import stage
from dgl_mgpu.training.whereabouts import Whereabouts, last_stage, shared_stage, stage_of


def test_an_error_knows_the_stage_it_comes_from():
    with pytest.raises(KeyError) as failure, Whereabouts(), stage("evaluate"):
        with stage("sample"):
            pass
        with stage("load"), stage("gather"):
            raise KeyError
    assert stage_of(failure.value) == " in stage gather of load of evaluate"
    with pytest.raises(KeyError) as failure, Whereabouts(), stage("forward"):
        with pytest.raises(ValueError), stage("gather"):
            raise ValueError
        raise KeyError
    assert stage_of(failure.value) == " in stage forward"
    with pytest.raises(KeyError) as failure, Whereabouts():
        raise KeyError
    assert stage_of(failure.value) == ""


def test_others_see_the_stage_a_process_is_in_and_its_workers_do_not_change_it():
    shown = shared_stage()
    assert last_stage(shown) == ""
    with Whereabouts(shown):
        assert last_stage(shown) == ""
        with stage("evaluate"):
            with stage("gather"):
                assert last_stage(shown) == " in stage gather of evaluate"
            assert last_stage(shown) == " in stage evaluate"
            worker = os.fork()
            if not worker:
                stage("sample").__enter__()
                os._exit(0)
            os.waitpid(worker, 0)
            assert last_stage(shown) == " in stage evaluate"
        assert last_stage(shown) == ""
        with stage("x" * 200):
            assert last_stage(shown) == " in stage " + "x" * 80
    with stage("forward"):
        assert last_stage(shown) == ""
