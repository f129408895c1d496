"""The ``torch.library`` namespace of this package's operators, ``torch.ops.dgl_mgpu``.

An operator's ``op.py`` defines its schema and fake kernel here; ``cpu.py`` registers itself
for CPU tensors.  On tensors of a device that has no kernel torch's dispatcher raises
NotImplementedError.
"""

from __future__ import annotations

import torch

library = torch.library.Library("dgl_mgpu", "FRAGMENT")
