"""What `task.data.normalise` takes off pixels and divides them by. Imports no torch."""

from __future__ import annotations

# Mean and standard deviation of each channel, of values in 0..1.
NORMALS = {
    "none": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),  # as torchvision's models are trained
}
