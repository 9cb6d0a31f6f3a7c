"""What secrets look like: tokens of known services, and the names that stand before a secret.

Shapes are those that the services document, or that secret scanners (gitleaks, GitHub secret scanning) look for.
"""

from __future__ import annotations

import re

# A token that its own beginning gives away. Lengths are the shortest that the service has given out.
TOKENS = {
    "Hugging Face": r"\bhf_[A-Za-z0-9]{30,}|\bapi_org_[A-Za-z0-9]{30,}",
    "OpenAI, Anthropic, DeepSeek": r"\bsk-(?=[A-Za-z0-9_-]{0,99}?[0-9])[A-Za-z0-9_-]{20,}",
    "AWS access key": r"\b(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}\b",
    "GitHub": r"\bgh[pousr]_[A-Za-z0-9]{36,}|\bgithub_pat_[A-Za-z0-9_]{22,}",
    "GitLab": r"\bgl(?:pat|cbt|dt|rt|ptt)-[A-Za-z0-9_-]{20,}",
    "Slack": r"\b(?:xox[abeoprs]|xapp)-[A-Za-z0-9-]{10,}|\bhooks\.slack\.com/services/[A-Za-z0-9/_-]{20,}",
    "Google": r"\bAIza[A-Za-z0-9_-]{35}|\bya29\.[A-Za-z0-9_-]{20,}|\bGOCSPX-[A-Za-z0-9_-]{20,}",
    "Weights & Biases": r"\bwandb_v[0-9]_[A-Za-z0-9_]{20,}|\blocal-[0-9a-f]{40}\b",
    "Stripe": r"\b[rs]k_(?:live|test)_[A-Za-z0-9]{16,}",
    "npm, PyPI, Docker": r"\bnpm_[A-Za-z0-9]{36}|\bpypi-[A-Za-z0-9_-]{50,}|\bdckr_pat_[A-Za-z0-9_-]{20,}",
    "NVIDIA, Replicate, Groq": r"\bnvapi-[A-Za-z0-9_-]{40,}|\br8_[A-Za-z0-9]{30,}|\bgsk_[A-Za-z0-9]{40,}",
    "addresses of chats, which are secret": (
        r"\bdiscord(?:app)?\.com/api/webhooks/[0-9]+/[A-Za-z0-9_-]{20,}|"
        r"(?<![0-9])[0-9]{8,10}:AA[A-Za-z0-9_-]{33}|"
        r"\bwebhook\.office\.com/webhookb2/[A-Za-z0-9@/_-]{20,}"
    ),
    "SendGrid, DigitalOcean, Grafana": (
        r"\bSG\.[A-Za-z0-9_-]{22}\.[A-Za-z0-9_-]{43}|\bdo[opr]_v1_[0-9a-f]{64}|\bglsa_[A-Za-z0-9]{32}_[0-9a-f]{8}|"
        r"\bglc_[A-Za-z0-9+/=]{32,}"
    ),
    "Databricks": r"\bdapi[0-9a-f]{32}(?:-[0-9]+)?\b",
    "xAI, Perplexity, Pinecone": r"\bxai-[A-Za-z0-9]{40,}|\bpplx-[A-Za-z0-9]{40,}|\bpcsk_[A-Za-z0-9_]{40,}",
    "Kaggle, RunPod, Together": r"\bKGAT_[0-9a-f]{32}|\brpa_[A-Za-z0-9]{40,}|\btgp_v1_[A-Za-z0-9_-]{40,}",
    "LangSmith, Neptune, Vault": (
        r"\blsv2_(?:pt|sk)_[0-9a-f]{32}_[0-9a-f]{8,}|\beyJhcGlf[A-Za-z0-9+/_=-]{40,}|\bhv[sb]\.[A-Za-z0-9_-]{24,}"
    ),
    "JSON web token": r"\beyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*",
    "private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
}

# Words that name a secret, as they end an option, a variable, a key of a table or of a URL. "tokens", "tokenizer",
# "pad_token" and "sort_key" name none.
_KEY = (
    r"(?:api|access|secret|private|auth|account|storage|signing|encryption|deploy|master|wandb|openai|hf|ssh|"
    r"routing|integration)"
)
_TOKEN = (
    r"(?:api|access|auth|bearer|hf|hub|hugging_?face|refresh|session|security|id|github|gh|gitlab|slack|wandb|bot|"
    r"secret|use_auth|personal|deploy)"
)
_PASSWORD = r"passw(?:or)?d|passphrase|(?<![a-z])pwd"
_LONG_NAME = (
    rf"[a-z0-9_.-]*?(?:{_KEY}[_-]?key(?:[_-]?id)?|{_TOKEN}[_-]?token|secret(?:s)?|credentials?|client[_-]?secret|"
    rf"connection[_-]?string|{_PASSWORD})"
)
NAME = rf"(?:{_LONG_NAME}|(?:[a-z0-9_.-]*\barguments\.)?token)"

# Keys and options whose whole value is secret, also where it is a list or a table: {"passwords": [...]}.
NAMED = re.compile(rf"(?i)\A-*(?:{_LONG_NAME}s?|token|(?:proxy-)?authorization|(?:set-)?cookie)\Z")
NUMBERED = re.compile(rf"(?i)\A-*[a-z0-9_.-]*?(?:{_PASSWORD}|secret)\Z")  # and where it is a number
# --api-key VALUE, api_key=VALUE, "api_key": "VALUE", also where that JSON stands in other JSON (\\"). A value ends at a
# blank, a quote, or where a URL's next part does; one in quotes that has blanks, at the quote that it began with.
_QUOTE = r"\\?[\"']"
# os.environ["HF_TOKEN"] = "VALUE", environ.setdefault("HF_TOKEN", "VALUE"): lines of code, as tracebacks quote them.
_BEFORE = (
    rf"(?:(?<![a-z0-9_.-])(?:--?{NAME}(?:\s+|\s*=\s*)|"
    rf"(?:{_QUOTE})?{NAME}(?:{_QUOTE}\]?)?\s*(?:=|:(?=\s*{_QUOTE}))\s*)|"
    rf"\b(?:set|put|get)[a-z_]{{0,19}}\({_QUOTE}{NAME}{_QUOTE}\s*,\s*(?={_QUOTE}))"
)
# The blank is looked for first: to split the value at each of its blanks would take the square of a long text's time.
QUOTED = re.compile(
    rf"(?i)(?P<head>{_BEFORE}(?P<quote>{_QUOTE}))"
    r"(?P<secret>(?=[^\s\"'\\]*\s)[^\n\"'\\]*(?:\n[^\n\"'\\]*)?)(?=(?P=quote))"
)
BEFORE = re.compile(rf"(?i)(?P<head>{_BEFORE}(?:{_QUOTE})?)(?P<secret>(?![-\"'{{\[(<$\\])[^\s\"'&,;}})\]\\]+)")
# X-Api-Key: VALUE, password: VALUE, without quotes: a value that no word is.
HEADED = re.compile(
    rf"(?i)(?P<head>(?<![a-z0-9_.-]){_LONG_NAME}:\s*)"
    r"(?P<secret>(?=[^\s\"',;]{0,99}?[0-9])[^\s\"'{\[(<$&,;})\]]{8,})"
)
# WANDB_KEY=..., MY_TOKEN=..., DB_PASS=...: a variable of the environment, with a value that no word is.
VARIABLE = re.compile(
    r"(?P<head>\b[A-Z0-9_]*(?:KEY|_PASS|_TOKEN)=[\"']?)(?P<secret>(?=[A-Za-z0-9+/_=.-]{0,99}?[0-9])[A-Za-z0-9+/_=.-]{8,})"
)
# wandb login 0123...: forty hexadecimal digits alone may be a commit.
WANDB = re.compile(r"(?i)(?P<head>\bwandb(?:_[a-z_]{1,20})?\b[^\n]{0,40}?[\s=:\"'])(?P<secret>[0-9a-f]{40})\b")
HEADER = re.compile(
    r"(?i)(?P<head>\bauthorization[\"']?\s*[:=]\s*[\"']?(?:[a-z]+\s+)?|\bbearer\s+(?=[^\s]{0,99}?[0-9]))"
    r"(?P<secret>[A-Za-z0-9._~+/=-]{8,})"
)
# Cookie: NAME=VALUE; NAME=VALUE: all of them, since any may be that of a session.
_PAIR = r"[^\s=;,\"']{1,99}=[^\s;,\"']*"
COOKIE = re.compile(rf"(?i)(?P<head>\bcookie(?:{_QUOTE})?\s*:\s*(?:{_QUOTE})?)(?P<secret>{_PAIR}(?:;\s*{_PAIR})*)")
# curl -u NAME:VALUE, and the same words as a list.
CURL = re.compile(
    r"(?P<head>\bcurl\b[^\n]{0,200}?\s[\"']?(?:-u|--user)[\"']?[\s=,]+[\"']?[^\s:\"']{1,99}:)(?P<secret>[^\s\"']+)"
)
# A user with a password, or a user who is a token: long, and no word.
URL = re.compile(
    r"(?i)(?P<head>\b[a-z][a-z0-9+.-]{0,30}://)"
    r"(?P<secret>[^\s/@:\"']*:[^\s/\"']+|(?=[a-z_-]{0,99}?[0-9])[a-z0-9_-]{20,})(?=@)"
)
SIGNED = re.compile(
    r"(?i)(?P<head>[?&](?:sig|signature|x-amz-signature|x-amz-credential|x-amz-security-token|key|code|"
    r"x-goog-signature|x-goog-credential)=)(?P<secret>[^\s&\"'#]{8,})"
)

KNOWN = re.compile("|".join(f"(?P<s{at}>{shape})" for at, shape in enumerate(TOKENS.values())))
# Texts of which each match of a pattern has one. To look for them takes a small part of what the pattern takes, and
# ranks may print thousands of lines a second.
SIGNS_OF_KNOWN = (
    "hf_", "api_org_", "sk-", "AKIA", "ASIA", "ABIA", "ACCA", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_",
    "glpat-", "glcbt-", "gldt-", "glrt-", "glptt-", "xox", "xapp-", "hooks.slack.com", "AIza", "ya29.", "GOCSPX-",
    "wandb_v", "local-", "k_live_", "k_test_", "npm_", "pypi-", "dckr_pat_", "nvapi-", "r8_", "gsk_",
    "com/api/webhooks/", ":AA", "webhook.office.com", "SG.", "_v1_", "glsa_", "glc_", "dapi", "xai-", "pplx-", "pcsk_",
    "KGAT_", "rpa_", "lsv2_", "hvs.", "hvb.", "eyJ", "-----BEGIN",
)  # fmt: skip
_NAMES = ("key", "token", "secret", "credential", "connection", "passw", "passphrase", "pwd")
AFTER_A_NAME: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...] = (  # with signs in lower case
    (URL, ("://",)), (HEADER, ("authorization", "bearer")), (COOKIE, ("cookie",)), (QUOTED, _NAMES), (BEFORE, _NAMES),
    (HEADED, _NAMES), (VARIABLE, ("key=", "_pass=", "_token=")), (WANDB, ("wandb",)), (CURL, ("curl",)),
    (SIGNED, ("sig=", "signature=", "credential=", "token=", "key=", "code=")),
)  # fmt: skip
FOLDED_TO_ASCII = "\u0130\u0131\u017f\u212a"  # letters that (?i) takes for ASCII's, and lower() may not
