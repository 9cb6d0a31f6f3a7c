"""What a URL announces of a machine's end: metadata services of clouds, each asked as it wants to be, and any other.

What the services' pages say, which servers of the tests follow (no machine of a cloud was there to ask):

- AWS: `spot/instance-action` (Amazon EC2 User Guide, "Spot Instance interruption notices") is 404 until there is a
  notice, two minutes before the end. IMDSv2 answers 401 to who shows no token of `PUT /latest/api/token`.
- Google Cloud: `instance/preempted` (Compute Engine, "Create and use preemptible VMs") is FALSE, then TRUE, 30 s before
  the end; every question needs the header `Metadata-Flavor: Google`.
- Azure: `scheduledevents` (Azure, "Scheduled Events for Linux VMs") is JSON, with the events of all machines that were
  deployed together; every question needs the header `Metadata: true`. The first one may take two minutes.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.spec.survive.recovery import NOTICE_SERVICES

TOKEN_PATH, TOKEN_SECONDS = "/latest/api/token", 21600
NAME_PATH = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
# Answers that announce no end. Of Google's a live migration is none.
NOTHING = ("", "NONE", "FALSE", "MIGRATE_ON_HOST_MAINTENANCE")
ENDING_EVENTS = ("Preempt", "Terminate", "Redeploy", "Reboot")  # of Azure: after Freeze a machine goes on
NOT_THERE = (404, 410)  # nothing is announced
ATTEMPTS = 3  # questions without an answer, one after the other, after which nobody is known to listen
Failure = (urllib.error.URLError, http.client.HTTPException, OSError, ValueError)  # or no HTTP at all


@dataclass(frozen=True)
class Announced:
    """An answer: what announces an end, and why an end would not be announced; "" for nothing of the kind."""

    notice: str = ""
    refusal: str = ""


class NoticeUrl:
    """A URL that is asked again and again whether this machine is to end.

    Whose service it is, its path says.
    """

    def __init__(self, url: str, answer_seconds: float) -> None:
        """`url` may be the name of a cloud (`NOTICE_SERVICES`). `answer_seconds` is how long an answer may take."""
        self.url = NOTICE_SERVICES.get(url, url)
        self._seconds, self._refusals = answer_seconds, 0
        path = urllib.parse.urlsplit(self.url).path
        self._is_aws, self._is_google = path.startswith("/latest/"), path.startswith("/computeMetadata/")
        self._is_azure = path.startswith("/metadata/scheduledevents")
        # A metadata service is on this machine's own link: a proxy of the environment would ask for its own end.
        is_cloud = self._is_aws or self._is_google or self._is_azure
        self._opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if is_cloud else []))
        self._token = ""  # of AWS
        self._name = ""  # of this machine, as Azure's events have it

    def ask(self) -> Announced:
        """Return what is announced now; a refusal once, when the service has not answered several times in a row."""
        try:
            text = self._text()
        except urllib.error.HTTPError as error:
            if error.code in NOT_THERE:
                self._refusals = 0
                return Announced()
            self._token = ""  # whose time may be over
            return self._refused(f"it answers {error.code} {error.reason}")
        except Failure as error:
            return self._refused(f"nobody answers: {getattr(error, 'reason', error)}")
        self._refusals = 0
        text = self._ending_event(text) if self._is_azure else text
        return Announced() if text.upper() in NOTHING else Announced(f"a notice came from {self.url}: {text}")

    def _refused(self, because: str) -> Announced:
        self._refusals += 1
        return Announced(refusal=because if self._refusals == ATTEMPTS else "")

    def _text(self) -> str:
        if self._is_google:
            return self._get(self.url, {"Metadata-Flavor": "Google"})
        if self._is_azure:
            return self._get(self.url, {"Metadata": "true"}, most=1 << 20)
        return self._get(self.url, self._token_header() if self._is_aws else {})

    def _token_header(self) -> dict[str, str]:
        """Return the header of who may ask AWS's service; none where it gives no tokens, as its first version."""
        if not self._token:
            header = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)}
            try:
                self._token = self._get(self._beside(TOKEN_PATH), header, method="PUT")
            except Failure:
                return {}
        return {"X-aws-ec2-metadata-token": self._token}

    def _ending_event(self, text: str) -> str:
        """Return Azure's first event that ends this machine, in words, or ""."""
        try:
            events = json.loads(text).get("Events") or []
            found = [each for each in events if each.get("EventType") in ENDING_EVENTS and self._is_of_here(each)]
        except (ValueError, AttributeError, TypeError):  # no answer of that service
            return ""
        if not found:
            return ""
        before = found[0].get("NotBefore")
        return f"{found[0]['EventType']}{f', not before {before}' if before else ''}"

    def _is_of_here(self, event: Mapping[str, object]) -> bool:
        """Return whether an event is this machine's, whose name the service knows; of an unknown name all are."""
        if not self._name:
            try:
                self._name = self._get(self._beside(NAME_PATH), {"Metadata": "true"})
            except Failure:
                return True
        names = event.get("Resources")
        return not isinstance(names, list) or self._name in names

    def _beside(self, path: str) -> str:
        return urllib.parse.urljoin(self.url, path)

    def _get(self, url: str, headers: Mapping[str, str], method: str = "GET", most: int = 200) -> str:
        request = urllib.request.Request(url, headers=dict(headers), method=method)
        with self._opener.open(request, timeout=self._seconds) as answer:
            text: bytes = answer.read(most)
        return text.decode(errors="replace").strip()
