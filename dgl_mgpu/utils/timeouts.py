"""How long this package waits for other processes, machines and files, in seconds.

Every wait has a limit, and what is raised or logged at its end says what was waited for.  A job in
which no rank advances any more ends by ``trainer.hang_after``, which is the user's to choose.
"""

from __future__ import annotations

#: For all ranks to join a job, and in it for each exchange of tensors.
JOIN = 600.0
#: For a connection to torchrun's store, and an answer of it.
CONNECT = 30.0
#: For ranks to stop by themselves once they were asked to.
STOP = 25.0
#: For other ranks' reports after a cause of failure, and for the cause after reports of its
#: consequences: a killed rank has closed its connections before it has ended, and a GPU's memory
#: takes seconds to free.
REPORTS = 2.0
CAUSE = 10.0
#: For the end of a rank that has said that it is done: its interpreter shuts down.
LEAVE = 60.0
#: For the end of a process that was killed: in more than this, a device or a file system keeps it.
END = 20.0
#: For the end of a command after Ctrl-C.
INTERRUPT = 30.0
#: For the folder that another process builds, a data set that it generates or downloads; and for
#: each exchange of Python objects, before which one rank may do that while the others wait for it.
BUILD = 6 * 3600.0
