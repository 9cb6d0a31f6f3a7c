"""Secrets of every known shape leave what a journal holds, and words that only look a little like them stay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.spec.journal.kinds import DecisionRecord
from paceline.spec.journal.line import line_of
from paceline.spec.journal.redact import MARK, Redactor
from paceline.spec.journal.secret_shapes import AFTER_A_NAME, KNOWN

# Made up, and put together here so that no scanner takes this file for a leak.
HEX = "0123456789abcdef" * 3
LONG = "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7" * 4
TOKENS = {
    "hugging face": "hf_" + LONG[:34],
    "openai": "sk-" + LONG[:48],
    "openai project": "sk-proj-" + LONG[:60],
    "anthropic": "sk-ant-api03-" + LONG[:60] + "_x-AA",
    "aws": "AKIA" + "IOSFODNN7EXAMPLE",
    "aws session": "ASIA" + "IOSFODNN7EXAMPLE",
    "github": "ghp_" + LONG[:36],
    "github app": "ghs_" + LONG[:36],
    "github fine-grained": "github_pat_" + LONG[:22] + "_" + LONG[:59],
    "gitlab": "glpat-" + LONG[:20],
    "slack": "xoxb-" + "123456789012-" + LONG[:24],
    "google": "AIza" + LONG[:35],
    "google oauth": "ya29." + LONG[:40],
    "wandb new": "wandb_v1_" + LONG[:60],
    "wandb local": "local-" + HEX[:40],
    "stripe": "sk_live_" + LONG[:24],
    "npm": "npm_" + LONG[:36],
    "pypi": "pypi-" + LONG[:60],
    "nvidia": "nvapi-" + LONG[:64],
    "jwt": "eyJ" + LONG[:20] + ".eyJ" + LONG[:30] + "." + LONG[:20],
    "slack app": "xapp-1-" + LONG[:11] + "-" + HEX[:20],
    "discord webhook": "discord.com/api/webhooks/1234567890/" + LONG[:60],
    "telegram bot": "123456789" + ":AA" + LONG[:33],
    "databricks": "dapi" + HEX[:32],
    "databricks with a number": "dapi" + HEX[:32] + "-2",
    "teams webhook": "webhook.office.com/webhookb2/" + HEX[:36] + "@" + HEX[:36] + "/IncomingWebhook/" + HEX[:32],
    "sendgrid": "SG." + LONG[:22] + "." + LONG[:43],
    "digitalocean": "dop_v1_" + HEX + HEX[:16],
    "grafana": "glsa_" + LONG[:32] + "_" + HEX[:8],
    "xai": "xai-" + LONG[:80],
    "kaggle": "KGAT_" + HEX[:32],
    "runpod": "rpa_" + LONG[:44],
    "together": "tgp_v1_" + LONG[:43],
    "perplexity": "pplx-" + LONG[:48],
    "pinecone": "pcsk_" + LONG[:60],
    "langsmith": "lsv2_pt_" + HEX[:32] + "_" + HEX[:10],
    "neptune": "eyJhcGlf" + LONG[:90],
    "vault": "hvs." + LONG[:40],
    "private key": "-----BEGIN RSA PRIVATE KEY-----\n" + LONG + "\n-----END RSA PRIVATE KEY-----",
}
SECRET = "hunter2-and-more"
IN_CONTEXT = {
    "bearer": f"Authorization: Bearer {LONG[:30]}",
    "basic": "authorization: Basic dXNlcjpwYXNzd29yZA==",
    "bearer alone": f"curl -H 'bearer {LONG[:30]}'",
    "url": "https://user:p4ss@example.com/data",
    "address of a telegram bot": f"https://api.telegram.org/bot123456789:AA{LONG[:33]}/sendMessage",
    "key of a pager": f'{{"routing_key": "{HEX[:32]}"}}',
    "key of an older pager": f"--integration-key {HEX[:32]}",
    "url without a user": "redis://:p4ssw0rd@cache:6379/0",
    "url with signs": "postgresql://me:p@ss:word@db/runs",
    "query": f"https://example.com/x?token={SECRET}&page=2",
    "signed": f"https://s3.example.com/x?X-Amz-Signature={HEX}&X-Amz-Date=2026",
    "option": f"train.py --api-key {SECRET} --steps 3",
    "option with =": f"train.py --api-key={SECRET}",
    "option with _": f"train.py --hf_token {SECRET}",
    "wandb option": f"train.py --wandb-key {SECRET}",
    "password": f"--password {SECRET}",
    "override": f"--set task.data.arguments.api_key={SECRET}",
    "variable": f"OPENAI_API_KEY={SECRET} python train.py",
    "aws secret": f"AWS_SECRET_ACCESS_KEY={LONG[:40]}",
    "other key": f"MY_KEY={LONG[:24]}",
    "bare key": f"KEY={LONG[:24]}",
    "hf variable": f"export HF_TOKEN={SECRET}",
    "wandb variable": f"WANDB_API_KEY={HEX[:40]}",
    "wandb login": f"wandb login {HEX[:40]}",
    "wandb relogin": f"wandb login --relogin {HEX[:40]}",
    "json": f'{{"api_key": "{SECRET}"}}',
    "python": f"client(password='{SECRET}')",
    "toml": f'secret = "{SECRET}"',
    "header": f"X-Api-Key: {SECRET}",
    "yaml": f"password: {SECRET}",
    "argument": f"--set task.data.arguments.token={SECRET}",
    "json within json": f'{{\\"api_key\\": \\"{SECRET}\\", \\"steps\\": 3}}',
    "words": '{"password": "a pass of words", "steps": 3}',
    "words in single quotes": "client(secret='a pass of words', steps='all of them')",
    "words of an argument": "--set 'task.data.arguments.token=\"a pass of words\"'",
    "password of a database": "DB_PASS=s3same-open",
    "user that is a token": f"https://{HEX[:32]}@example.com/x",
    "line of a traceback": f"    os.environ['HF_TOKEN'] = '{SECRET}'",
    "call in a traceback": f'    os.environ.setdefault("WANDB_API_KEY", "{SECRET}")',
    "call with words": '    monkeypatch.setenv("DB_PASSWORD", "a pass of words")',
    "token of a firm": f"EXAMPLE_TOKEN={LONG[:24]} python train.py",
    "call of one's own": f'    vault.set_secret("API_KEY", "{LONG[:24]}")',
    "cookie": f"Cookie: session={LONG[:24]}; theme=dark",
    "second cookie": f"curl -H 'Cookie: lang=en; session={LONG[:24]}' https://example.com",
    "cookies of a dict": f'{{"Cookie": "theme=dark-and-large; sid={LONG[:24]}"}}',
    "user of curl": "curl -s -u me:p4ss-of-mine https://example.com",
    "user of curl in words": "['curl', '--user', 'me:p4ss-of-mine']",
    "variable of wandb": f"WANDB_KEY {HEX[:40]}",
}
# The part of IN_CONTEXT that must be gone.
PARTS = {
    "bearer": LONG[:30], "basic": "dXNlcjpwYXNzd29yZA", "bearer alone": LONG[:30], "url": "p4ss",
    "address of a telegram bot": f"https://api.telegram.org/bot123456789:AA{LONG[:33]}/sendMessage",
    "key of a pager": f'{{"routing_key": "{HEX[:32]}"}}',
    "key of an older pager": f"--integration-key {HEX[:32]}",
    "url without a user": "p4ssw0rd", "url with signs": "p@ss:word", "signed": HEX, "aws secret": LONG[:40],
    "other key": LONG[:24], "bare key": LONG[:24], "wandb variable": HEX[:40], "wandb login": HEX[:40],
    "wandb relogin": HEX[:40], "words": "a pass of words", "words in single quotes": "a pass of words",
    "words of an argument": "a pass of words", "password of a database": "s3same-open",
    "user that is a token": HEX[:32], "call with words": "a pass of words", "token of a firm": LONG[:24],
    "cookie": f"session={LONG[:24]}; theme=dark", "second cookie": f"lang=en; session={LONG[:24]}",
    "cookies of a dict": f"theme=dark-and-large; sid={LONG[:24]}", "call of one's own": LONG[:24],
    "user of curl": "p4ss-of-mine", "user of curl in words": "p4ss-of-mine",
    "variable of wandb": HEX[:40],
}  # fmt: skip
HARMLESS = [
    "paceline train examples/stdlib-code.toml --steps 30 --run-dir runs/short",
    "--set task.optimizer.lr=1e-3 --set task.data.tokenizer=bytes",
    "--set KEY=VALUE replaces one value",
    "131,072 tokens/step, 67.2 k tok/s, tokens_per_second=17523.0",
    "tokens = 512, tokenizer = 'bpe', max_tokens=4096, pad_token='<pad>', eos_token=</s>, bos_token: '<s>'",
    "task.schedule was 'cosine' and is now 'linear'",
    "sk-learn-compatible-estimators and risk-adjusted-returns-of-1990",
    "sort_key=step, primary_key=id, key=value, keys=3, keyword=x, monkey=1",
    "hf_name, hf_config, hf_model_of_the_day, ghp_, npm_config_cache, gsk_",
    "the commit " + HEX[:40] + " of the repository, sha256 " + HEX + HEX[:16],
    "https://example.com:8080/path@v2/x?page=2&code=7", "ssh://git@github.com/a/b.git", "s3://bucket/key/of/a/file",
    "file:///tmp/rendezvous", "tcp://node-1:29500", "user@example.com wrote at 12:30",
    "an objective of your own: package.module:function",
    "passwords are not kept; the secret of a good warm-up; bearer of bad news; basic characterization of losses",
    "layers.0.attention.q_proj.weight, embed_tokens.weight, token_embedding.weight, key_padding_mask",
    "dp_shard=2 pp=2 · ZeRO-1 · 1f1b, 2 stages · micro-batch 2 x 3 accumulation",
    "CUDA_VISIBLE_DEVICES=0,1 OMP_NUM_THREADS=1 python -m paceline train",
    "rank 1 of 2 was ended by SIGKILL; authorization failed; Authorization needed",
    "the password: none given; secret: unknown; api_key: missing at 12:30; token: layers.0.attention",
    "https://a-user-of-a-long-name@example.com/x, forward_pass=12345678, BACKWARD_PASS=of_words, 'pad.token'='a b'",
    "it's a secret of the model's and 'b c', xai-models-of-1990, pplx-70b-online, hvs.conf, lsv2_pt_, pcsk_",
    "config.get('pad_token', '<pad>'), names = ['api_key', 'steps'], os.environ['HF_HOME'] = '/data/hf'",
    "docker run -u 1000:1000 image, curl -s -u, BOS_TOKEN=<s>, EOS_TOKEN=endoftext, a cookie: it is sweet",
    "eyJ is how base64 of JSON begins", "AKIA", "AIza", "local-rank 3", "runs/sk-12/journal",
]  # fmt: skip


@pytest.mark.parametrize("kind", TOKENS)
@pytest.mark.parametrize("around", ["{}", "--x {} y", '{{"a": "{}"}}', "https://example.com/{}?x=1", "path/{}.json"])
def test_tokens_of_known_shapes(kind: str, around: str) -> None:
    token = TOKENS[kind]
    cleaned = Redactor().text(around.format(token))
    assert MARK in cleaned and token not in cleaned and token[-8:] not in cleaned
    for part in around.format(" ").split(" "):
        assert part.strip('"') in cleaned, "what is around a secret stays"


@pytest.mark.parametrize("kind", IN_CONTEXT)
def test_what_stands_behind_a_name(kind: str) -> None:
    text, secret = IN_CONTEXT[kind], PARTS.get(kind, SECRET)
    assert secret in text
    cleaned = Redactor().text(text)
    assert secret not in cleaned and cleaned.count(MARK) == 1, cleaned
    before, _, after = cleaned.partition(MARK)
    assert text.startswith(before) and text.endswith(after), "what is around a secret stays"
    assert len(before) + len(after) >= len(text) - len(secret) - len("user:=="), "and nothing else goes"


@pytest.mark.parametrize("text", HARMLESS)
def test_harmless_words_stay(text: str) -> None:
    assert Redactor().text(text) == text
    assert Redactor().data(text.split()) == text.split()


def test_options_names_and_keys_of_nested_data() -> None:
    record: dict[str, Any] = {
        "command": ["train.py", "--api-key", SECRET, "--password", "--steps", "3", f"--token={SECRET}", "-v"],
        "spec": {"task": {"model": {"arguments": {"auth_token": SECRET, "layers": 2, "token": "", "secret": None}}}},
        "environment": {"WANDB_API_KEY": SECRET, "HOME": "/root", "HF_TOKEN": SECRET, "FIRM_KEY": f"{SECRET}-2"},
        "unit": "tokens", "tokens_per_sample": 64, "steps": (1, 2.5, True), "key": "step",
    }  # fmt: skip
    cleaned = Redactor().data(record)
    assert SECRET not in json.dumps(cleaned)
    assert cleaned["command"] == ["train.py", "--api-key", MARK, "--password", "--steps", "3", f"--token={MARK}", "-v"]
    arguments = cleaned["spec"]["task"]["model"]["arguments"]
    assert arguments == {"auth_token": MARK, "layers": 2, "token": "", "secret": None}
    assert cleaned["environment"] == {"WANDB_API_KEY": MARK, "HOME": "/root", "HF_TOKEN": MARK, "FIRM_KEY": MARK}
    assert {name: cleaned[name] for name in ("unit", "tokens_per_sample", "steps", "key")} == {
        "unit": "tokens", "tokens_per_sample": 64, "steps": [1, 2.5, True], "key": "step",
    }  # fmt: skip


def test_a_secret_of_several_words_goes_whole() -> None:
    for text in (
        '{"password": "%s", "steps": 3}',
        "client(secret='%s', steps='all of them')",
        r"{\"api_key\": \"%s\"}",
    ):
        assert Redactor().text(text % "a pass of words") == text % MARK
        assert Redactor().text(text % "one") == text % MARK
    assert Redactor().text("secret='it never ends\nor here") == f"secret='{MARK} never ends\nor here"


def test_a_long_text_behind_an_open_quote_takes_no_more_than_its_length() -> None:
    """Each blank of it was tried as the one that makes it words: this text took ten minutes, and takes a second."""
    words = "of a story " * 40_000
    assert Redactor().text(f'token="{words}') == f'token="{MARK} {words.partition(" ")[2]}'
    assert Redactor().text(f'token="{words}"') == f'token="{MARK}"'


def test_all_that_follows_the_name_of_several_secrets_goes() -> None:
    words = ["train.py", "--api-keys", SECRET, "two", "--steps", "3", "file.toml", "--secret", SECRET, "rest"]
    assert Redactor().data(words) == [
        "train.py", "--api-keys", MARK, MARK, "--steps", "3", "file.toml", "--secret", MARK, "rest",
    ]  # fmt: skip


class Client:
    """What a run may be given from Python; a journal spells it."""

    def __str__(self) -> str:
        return f"Client(api_key='{SECRET}', tries=3)"


def test_what_a_journal_spells_is_redacted_as_it_spells_it() -> None:
    token = TOKENS["hugging face"]
    found = Redactor().data({
        "path": Path(f"/data/{token}/x"), "client": Client(), "names": {token}, "bytes": token.encode(),
        "nested": [{"deep": (Client(),)}], "token": Client(), "passwords": [Path(SECRET)], "number": 3.5, "none": None,
    })  # fmt: skip
    assert token not in str(found) and SECRET not in str(found)
    assert found["path"] == f"/data/{MARK}/x" and found["client"] == f"Client(api_key='{MARK}', tries=3)"
    assert found["token"] == MARK and found["passwords"] == [MARK] and (found["number"], found["none"]) == (3.5, None)
    line = line_of(Redactor().record(DecisionRecord("plan", Client(), [token], "because", {"of": Path(token)})))
    assert SECRET.encode() not in line and token.encode() not in line


def test_a_secret_that_is_a_key_goes() -> None:
    token = TOKENS["hugging face"]
    assert Redactor().data({token: {"gradient_accumulation_steps": 3, f"of {token}": 4}}) == {
        MARK: {"gradient_accumulation_steps": 3, f"of {MARK}": 4}
    }


def test_all_that_a_key_names_as_secret_goes() -> None:
    nested = {
        "credentials": {"user": "me", "value": SECRET, "tries": 3, "on": True}, "passwords": [SECRET, ""],
        "api_keys": {"a": [SECRET]}, "headers": {"Authorization": SECRET, "Cookie": SECRET, "accept": "json"},
        "password": 1234567, "client_secret": 1.5, "secret": True, "access_tokens": 4096, "token": 7,
    }  # fmt: skip
    assert Redactor().data(nested) == {
        "credentials": {"user": MARK, "value": MARK, "tries": 3, "on": True}, "passwords": [MARK, ""],
        "api_keys": {"a": [MARK]}, "headers": {"Authorization": MARK, "Cookie": MARK, "accept": "json"},
        "password": MARK, "client_secret": MARK, "secret": True, "access_tokens": 4096, "token": 7,
    }  # fmt: skip


def test_patterns_of_ones_own() -> None:
    redactor = Redactor((r"ACME-\d+", "blue falcon"))
    assert redactor.text("ACME-7123 is project Blue, blue falcon") == f"{MARK} is project Blue, {MARK}"
    for pattern, says in (("(", "no regular expression"), ("x*", "matches the empty text")):
        with pytest.raises(ConfigError, match=says):
            Redactor((pattern,))


ODD = str.maketrans({"s": "\u017f", "k": "\u212a", "i": "\u0131", "I": "\u0130"})  # what (?i) takes for s, k and i


def test_what_is_looked_for_first_hides_no_secret() -> None:
    """Patterns are tried only where a text that each of their matches has is there: with them alone it is the same."""
    samples = [*TOKENS.values(), *IN_CONTEXT.values(), "no secret at all: 3 of 4, loss = 2.5", "ключ = секрет", ""]
    samples += [each.swapcase() for each in samples] + [each.translate(ODD) for each in samples]
    changed = 0
    for sample in [*samples, " ".join(samples)]:
        plain = KNOWN.sub(MARK, sample)
        for pattern, _ in AFTER_A_NAME:
            plain = pattern.sub(lambda found: found["head"] + MARK, plain)
        assert Redactor().text(sample) == plain, sample
        changed += plain != sample
    assert changed > len(TOKENS) + len(IN_CONTEXT)
