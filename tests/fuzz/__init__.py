"""Random models under random training loops: ``python -m tests.fuzz --help``.

A seed draws a case (:mod:`.draw`), which is data: a model of blocks and units, and a loop of events. :mod:`.execute` runs the
case with the library, with FSDP2, or with whole parameters in each process. A case with differences is shrunk (:mod:`.shrink`)
to few blocks, units and events, and printed as a script.
"""
