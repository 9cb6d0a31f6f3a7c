"""The loop by hand as Ray Train's function for each worker, which Ray starts again: `python ray_train.py FOLDER RANKS`.

It saves as the loop by hand does, which is less work than to report a checkpoint to Ray in every step.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def loop(config: dict[str, str]) -> None:
    """Train for ever, as one worker."""
    sys.path.insert(0, config["here"])
    from by_hand import train  # type: ignore[attr-defined]  # the file beside this one

    train(Path(config["folder"]))


def main(folder: Path, ranks: int) -> None:
    """Train on so many workers of a Ray of this machine alone."""
    os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(num_cpus=ranks + 1, include_dashboard=False, log_to_driver=False)
    TorchTrainer(
        loop,
        train_loop_config={"folder": str(folder), "here": str(Path(__file__).parent)},
        scaling_config=ScalingConfig(num_workers=ranks, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=3)),
    ).fit()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
