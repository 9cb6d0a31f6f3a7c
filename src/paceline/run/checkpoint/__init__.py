"""Checkpoints: safetensors shards and a JSON manifest that comes last. Nothing is pickled, every byte is checked.

Saved from any layout, loaded into any other. See manifest.py for the format and folder.py for names and publication.
"""

from paceline.run.checkpoint.export import WholeTensors, consolidate, full_tensors
from paceline.run.checkpoint.folder import Found, Listing, find_latest, list_checkpoints, verify_checkpoint
from paceline.run.checkpoint.load import Loaded, load_checkpoint, load_latest
from paceline.run.checkpoint.manifest import Manifest, TensorEntry, read_index, read_manifest
from paceline.run.checkpoint.save import CheckpointInfo, save_checkpoint
from paceline.run.checkpoint.state import materialise_optimizer_state, training_state

__all__ = [
    "CheckpointInfo",
    "Found",
    "Listing",
    "Loaded",
    "Manifest",
    "TensorEntry",
    "WholeTensors",
    "consolidate",
    "find_latest",
    "full_tensors",
    "list_checkpoints",
    "load_checkpoint",
    "load_latest",
    "materialise_optimizer_state",
    "read_index",
    "read_manifest",
    "save_checkpoint",
    "training_state",
    "verify_checkpoint",
]
