"""Training loops written by hand on torch's own parts, one file per axis: what `benchmarks/layouts.py` compares with.

The data axes are in `race/contenders.py`: `bare` is DistributedDataParallel, `bare_sharded` FSDP2.
"""
