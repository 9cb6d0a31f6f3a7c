"""What runs leave for the next forecast: the store, the term in a plan, runs on known machines, backtests of them."""

import dataclasses
import json
import math

import numpy as np
import pytest
from plan_examples import cluster, opened, plan, profile

from paceline.cluster.plain import cluster_from_dict
from paceline.config.plain import to_plain as _unused  # noqa: F401
