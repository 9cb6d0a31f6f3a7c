"""Writes what the tasks begin with: folders with a Llama, one with a head, a ConvNeXt; texts, a table, images."""

from __future__ import annotations

import csv
import sys
import sysconfig
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

PACKAGES = ("asyncio", "email", "xml")
LINE_CHARACTERS = (24, 96)
TEXT_BYTES = 400_000
EVERY = 5  # of so many documents one is held out
TRAINED, HELD_OUT = 2400, 400  # rows of the table
PICTURES = {"train": 600, "held_out": 200}
SIDE, NOISE, BAR = 32, 150, 220  # pixels; the most of the noise and the brightness of the bar, of 255


def lines_of(package: str) -> list[str]:
    """Return the lines of a package of the standard library that are long enough to tell it, each once."""
    root = Path(sysconfig.get_paths()["stdlib"]) / package
    texts = [path.read_text("utf-8", errors="replace") for path in sorted(root.rglob("*.py"))]
    low, high = LINE_CHARACTERS
    return list(dict.fromkeys(line.strip() for text in texts for line in text.splitlines() if low < len(line) < high))


def write_texts(folder: Path) -> str:
    """Write `{corpus,held_out}/*.txt`, each also as one text, and `table/{train,validation}.csv`; return all texts."""
    rows = [(line, package) for package in PACKAGES for line in lines_of(package)]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    kept = [rows[index] for index in order[: TRAINED + HELD_OUT]]
    (folder / "table").mkdir(parents=True)
    for name, part in (("train", kept[:TRAINED]), ("validation", kept[TRAINED:])):
        with (folder / "table" / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("text", "label"), *part])
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = {"corpus": "", "held_out": ""}
    for name in texts:
        (folder / name).mkdir()
    for number, path in enumerate(sorted(root.glob("*.py"))):
        if sum(map(len, texts.values())) < TEXT_BYTES:
            name = "held_out" if number % EVERY == EVERY - 1 else "corpus"
            texts[name] += (document := path.read_text("utf-8", errors="replace"))
            (folder / name / f"{path.stem}.txt").write_text(document)
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)
    (folder / "text.txt").write_text("".join(texts.values()))
    return "".join(texts.values())


def write_images(folder: Path) -> None:
    """Write `images/{train,held_out}/{lying,standing,leaning}/*.png`: a bar in noise, one of three ways round."""
    draw = np.random.default_rng(0)
    down, right = np.mgrid[:SIDE, :SIDE]
    along = {"lying": down, "standing": right, "leaning": (down + right) % SIDE}
    for part, count in PICTURES.items():
        for label in along:
            (folder / "images" / part / label).mkdir(parents=True)
        for number in range(count):
            label = list(along)[number % len(along)]
            pixels = draw.integers(0, NOISE, (SIDE, SIDE, 3))
            at = draw.integers(0, SIDE - 3)
            pixels[(along[label] >= at) & (along[label] < at + 3)] = BAR
            Image.fromarray(pixels.astype(np.uint8)).save(folder / "images" / part / label / f"{number:04d}.png")


def main(folder: Path) -> None:
    """Write all of it into a folder."""
    text = write_texts(folder)
    write_images(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|end_of_text|>"]
    tokenizer.train_from_iterator(
        text.splitlines(), trainers.BpeTrainer(vocab_size=1024, special_tokens=special, initial_alphabet=alphabet)
    )
    sizes = {
        "vocab_size": tokenizer.get_vocab_size(), "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0,
        "eos_token_id": 0, "bos_token_id": None,
    }  # fmt: skip
    torch.manual_seed(0)
    for name, kind, more in (
        ("base", transformers.LlamaForCausalLM, {}),
        ("head", transformers.LlamaForSequenceClassification, {"num_labels": len(PACKAGES)}),
    ):
        kind(transformers.LlamaConfig(**sizes, **more)).save_pretrained(folder / name)
        tokenizer.save(str(folder / name / "tokenizer.json"))
    sizes = {"hidden_sizes": [16, 32, 64], "depths": [1, 2, 1], "num_stages": 3, "num_labels": 3}
    config = transformers.ConvNextConfig(image_size=SIDE, **sizes)
    transformers.ConvNextForImageClassification(config).save_pretrained(folder / "convnext")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
