"""Checkpoints: safetensors shards and a JSON manifest that comes last. Nothing is pickled, every byte is checked.

Saved from any layout, loaded into any other. See manifest.py and index.py for the format, folder.py for names and
publication, save.py for the three calls of a save.
"""

from paceline.checkpoint.export import WholeTensors, consolidate, full_tensors
from paceline.checkpoint.folder import Found, Listing, find_latest, list_checkpoints, verify_checkpoint
from paceline.checkpoint.index import IndexReader, TensorEntry, TensorKind, read_index
from paceline.checkpoint.load import Loaded, load_checkpoint, load_latest
from paceline.checkpoint.manifest import Manifest, read_manifest
from paceline.checkpoint.save import CheckpointInfo, Written, publish, save_checkpoint, write
from paceline.checkpoint.save_plan import KeptPlan
from paceline.checkpoint.snapshot import Snapshot, take_snapshot
from paceline.checkpoint.state import materialise_optimizer_state, training_state

__all__ = [
    "CheckpointInfo",
    "Found",
    "IndexReader",
    "KeptPlan",
    "Listing",
    "Loaded",
    "Manifest",
    "Snapshot",
    "TensorEntry",
    "TensorKind",
    "WholeTensors",
    "Written",
    "consolidate",
    "find_latest",
    "full_tensors",
    "list_checkpoints",
    "load_checkpoint",
    "load_latest",
    "materialise_optimizer_state",
    "publish",
    "read_index",
    "read_manifest",
    "save_checkpoint",
    "take_snapshot",
    "training_state",
    "verify_checkpoint",
    "write",
]
