"""What an endpoint tells Prometheus, for tests to look into."""

from __future__ import annotations

import asyncio
import urllib.request

from prometheus_client.parser import text_string_to_metric_families


class Scrape:
    """One answer of `/metrics`.

    Attributes:
        text: As it came.
        names: Of all samples.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        self.names = {sample.name for sample in samples}
        self._samples = samples

    def __call__(self, name: str, **labels: str) -> float:
        """The sum of the samples of a name that have these labels; `cls` stands for `class`."""
        if "cls" in labels:
            labels["class"] = labels.pop("cls")
        return sum(
            sample.value
            for sample in self._samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    @property
    def series(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """Every sample by its name and labels."""
        return {(sample.name, frozenset(sample.labels.items())): sample.value for sample in self._samples}

    @property
    def labels(self) -> set[str]:
        """Every label of ours."""
        ours = (sample for sample in self._samples if sample.name.startswith("inferbus_"))
        return {label for sample in ours for label in sample.labels}


async def scrape(port: int) -> Scrape:
    """Asks an endpoint of this machine."""

    def get() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text: str = answer.read().decode()
        return text

    return Scrape(await asyncio.to_thread(get))
