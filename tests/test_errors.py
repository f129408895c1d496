"""How an error of this package reads: one sentence of what was asked, found and is to be done."""

from __future__ import annotations

import pickle

from dgl_mgpu.errors import ConfigError, DGLMGPUError, IdOutOfRangeError


def test_an_error_is_a_sentence_of_three_parts():
    parts = "gather rows of table 'feat'", "there is no row 12, the table has 10", "pass ids below"
    error = IdOutOfRangeError(*parts)
    sentence = (
        "cannot gather rows of table 'feat': there is no row 12, the table has 10; pass ids below"
    )
    assert str(error) == sentence
    assert (error.asked, error.found, error.fix) == parts
    assert str(pickle.loads(pickle.dumps(error))) == sentence  # as it goes to other ranks


def test_a_configuration_key_is_used_with_its_value():
    """Keys are no verbs, so the sentence has one before them; not for a value in later words."""
    error = ConfigError("trainer.ranks=0", "it is below 1", "use a positive number")
    assert str(error) == "cannot use trainer.ranks=0: it is below 1; use a positive number"
    error = ConfigError("plan with mode=fullgraph", "it has no store", "leave mode out")
    assert str(error) == "cannot plan with mode=fullgraph: it has no store; leave mode out"


def test_an_error_made_of_its_text_alone_is_that_text():
    """As a DataLoader makes the error of a worker anew."""
    assert str(DGLMGPUError("cannot read: it is gone; fetch it")) == (
        "cannot read: it is gone; fetch it"
    )
