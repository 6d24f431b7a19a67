"""GET /metrics: own names (memsvc_*), and the names of vLLM and SGLang that dashboards and benchmarks read."""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from launch.http.engine import Engine
from launch.http.metric_facts import Fact, Labels, engine_facts, front_link_fact, memory_facts
from launch.http.tally import Histogram, Tally
from memsvc.wire.admin import Stats


def render(engine: Engine, stats: Stats | None, bad_frames: dict[str, int]) -> bytes:
    """All metrics as Prometheus text. stats None: the memory service did not answer, its metrics are left out.

    bad_frames: frames that were no message, by link of the front.
    """
    facts = [*engine_facts(engine), front_link_fact(bad_frames)]
    if stats is not None:
        facts += memory_facts(stats, engine.config)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(facts, engine.tally, engine.config.model_name))
    return generate_latest(registry)


class _Snapshot(Collector):
    def __init__(self, facts: list[Fact], tally: Tally, model: str) -> None:
        self._facts = facts
        self._tally = tally
        self._model = model

    def collect(self) -> Iterator[Metric]:
        """Every family once."""
        for fact in self._facts:
            yield from _families(fact, self._model)
        yield from self._histograms()

    def _histograms(self) -> Iterator[Metric]:
        tally = self._tally
        table: list[tuple[str, Histogram, str]] = [
            ("memsvc_time_to_first_token_seconds vllm:time_to_first_token_seconds sglang:time_to_first_token_seconds",
             tally.ttft_s, "From the request to its first token"),
            ("memsvc_chunk_gap_seconds vllm:inter_token_latency_seconds sglang:inter_token_latency_seconds",
             tally.chunk_gap_s, "Between two arrivals of tokens, which may bring several each"),
            ("memsvc_time_per_output_token_seconds vllm:request_time_per_output_token_seconds",
             tally.tpot_s, "Per token after the first, over a whole answer"),
            ("memsvc_e2e_request_latency_seconds vllm:e2e_request_latency_seconds sglang:e2e_request_latency_seconds",
             tally.e2e_s, "From the request to its last token"),
            ("memsvc_request_prompt_tokens vllm:request_prompt_tokens", tally.prompt_tokens, "Prompt length"),
            ("memsvc_request_generation_tokens vllm:request_generation_tokens",
             tally.generation_tokens, "Answer length"),
            ("memsvc_request_accept_length", tally.accept_length,
             "Mean accept length of a request, the target's own token included"),
        ]  # fmt: skip
        for names, histogram, text in table:
            for name in names.split():
                labels = _common_labels(name, self._model)
                family = HistogramMetricFamily(name, text, labels=list(labels))
                family.add_metric(list(labels.values()), buckets=histogram.buckets(), sum_value=histogram.sum)
                yield family


def _common_labels(name: str, model: str) -> Labels:
    match name.partition(":"):
        case ("vllm", ":", _):
            return {"model_name": model, "engine": "0"}
        case ("sglang", ":", _):
            return {"model_name": model, "engine_type": "unified", "tp_rank": "0", "pp_rank": "0"}
        case _:
            return {"model_name": model}


def _families(fact: Fact, model: str) -> Iterable[Metric]:
    make = CounterMetricFamily if fact.is_counter else GaugeMetricFamily
    for name in fact.names.split():
        common = _common_labels(name, model)
        own = list(fact.samples[0][0]) if fact.samples else []
        family = make(name, fact.text, labels=[*common, *own])
        for labels, value in fact.samples:
            family.add_metric([*common.values(), *labels.values()], value)
        yield family
