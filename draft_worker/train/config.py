"""What the commands of this package can be told. Every field is a flag of the command that takes the config."""

from dataclasses import dataclass
from pathlib import Path

from target_worker.train.run_config import RunConfig

V1, V2 = 1, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterConfig:
    """The network to train. Widths and heads are the target's."""

    version: int = V2
    """2: DFlash2, with local convolutions and the candidate selector; 1: DFlash."""
    layers: int = 3
    """Draft layers."""
    taps: tuple[int, ...] = ()
    """Target layers whose outputs are the features, zero-based; none given: num_taps spread over the target."""
    num_taps: int = 4
    """Tapped layers where taps does not name them."""
    block_rows: int = 8
    """B: the anchor and B - 1 drafts."""
    window: int = 512
    """Keys a row sees: its own position and window - 1 before it; 0 = all."""
    mlp_width: int = 0
    """Width of the MLPs; 0 = the target's."""
    draft_vocab: int = 16384
    """Head rows: the tokens that the answers hold most often; 0 = the whole vocabulary."""
    mask_token_id: int = 16
    """Token whose embedding stands under the rows to be drafted."""
    conv_taps: int = 2
    """S: rows that a local convolution mixes."""
    conv_group: int = 16
    """g: channels that share a dynamic tap."""
    rank: int = 32
    """R of the selector."""
    top_k: int = 16
    """K: candidates that the selector ranks."""

    def __post_init__(self) -> None:
        if self.version not in (V1, V2):
            raise ValueError(f"--version is {self.version}, known are {V1} and {V2}")
        for name in ("layers", "num_taps", "conv_taps", "conv_group", "rank", "top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}, the least is 1")
        if self.block_rows < 2:
            raise ValueError(f"--block-rows is {self.block_rows}, the anchor and one draft need 2")


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """What is minimised over rows 1 to B - 1 of every block, row j weighted by exp(-(j - 1) / gamma)."""

    gamma: float = 4.0
    """Rows over which the weight falls to 1 / e."""
    cross_entropy: float = 0.5
    """Share of the cross-entropy with the answer's token."""
    total_variation: float = 0.5
    """Share of the total variation distance to the target's distribution."""
    tv_temperature: float = 1.0
    """Temperature of both distributions there."""
    selector: float = 1.0
    """Factor on the selector's cross-entropy."""

    def __post_init__(self) -> None:
        if min(self.gamma, self.tv_temperature) <= 0:
            raise ValueError(f"--gamma {self.gamma} and --tv-temperature {self.tv_temperature} must be above 0")
        if min(self.cross_entropy, self.total_variation, self.selector) < 0:
            raise ValueError("shares and factors of losses must not be negative")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig(RunConfig):
    """How to train. The same data, seed, steps and device give the same drafter, however the run is sliced."""

    epochs: float = 4.0
    """Passes over the answers where neither steps nor fit_seconds is given."""
    tokens_per_step: int = 32768
    """Tokens of answers and prompts in a step, padding included."""
    anchor_stride: int = 8
    """One anchor for so many places of an answer, chosen anew in every step."""
    held_out: int = 200
    """Prompts, by number, whose answers are kept from training; their acceptance is estimated."""

    def __post_init__(self) -> None:
        RunConfig.__post_init__(self)  # super() knows the class before it got its slots
        self._check_counts("tokens_per_step", "anchor_stride")
        if self.epochs <= 0:
            raise ValueError(f"--epochs is {self.epochs}, must be above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateConfig:
    """How the target answers. The same prompts, seed, slots and device give the same answers, if time allows."""

    slots: int = 4096
    """Answers under way at a time."""
    max_new: int = 512
    """Longest answer in tokens."""
    temperature: float = 0.8
    """Of the answers that are sampled."""
    samples: int = 1
    """Sampled answers to each prompt, beside the greedy one."""
    max_tokens: int = 0
    """No prompt is started once so many answer tokens are kept; 0 = no limit."""
    generate_seconds: float = 0.0
    """No prompt is started after so long; 0 = no limit. What is under way is finished."""
    refill_every: int = 16
    """Decode steps between two looks at which answers are finished."""
    seed: int = 0
    """Of the order of prompts and of sampling."""
    loop_ngram: int = 8
    """Length of the runs whose repetition counts as a loop."""
    loop_share: float = 0.3
    """An answer with a larger share of repeated runs is dropped."""

    def __post_init__(self) -> None:
        for name in ("slots", "max_new", "refill_every", "loop_ngram"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}, the least is 1")
        if self.temperature <= 0 or self.samples < 0:
            raise ValueError(f"--temperature {self.temperature} must be above 0, --samples {self.samples} at least 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptConfig:
    """What to ask the target."""

    gsm8k: Path | None = None
    """gsm8k_train.jsonl; its last questions are kept out."""
    gsm8k_held_out: int = 200
    """Questions at the end of that file that are never used."""
    num_code: int = 30000
    """Function stubs, most of them with a docstring, from installed packages."""
    num_docs: int = 15000
    """Openings of documentation from installed packages."""
    num_chat: int = 45000
    """Chat-like requests made of topics and tasks."""
    max_prompt: int = 256
    """Longest prompt in tokens, the chat template included; longer ones are left out."""
    openings: Path | None = None
    """Folder of token shards made by target_worker.train: prompts are openings of its texts, and nothing else."""
    num_openings: int = 60000
    """Openings, half of them from where texts begin."""
    least_opening: int = 16
    """Shortest opening in tokens."""
    most_opening: int = 96
    """Longest opening in tokens."""
    held_out_openings: int = 0
    """Openings of held-out texts, written as JSON lines to --held-out-file."""
    held_out_file: Path | None = None
    """Prompts for train.evaluate --raw."""
    seed: int = 0
    """Of choice and order."""

    def __post_init__(self) -> None:
        if not 1 <= self.least_opening <= self.most_opening:
            raise ValueError(f"--least-opening is {self.least_opening}, --most-opening {self.most_opening}")
        if self.held_out_openings and (self.openings is None or self.held_out_file is None):
            raise ValueError("--held-out-openings needs --openings and --held-out-file")


def model_folder_help() -> str:
    """What --target takes."""
    return "Hugging Face folder of the target, or smollm2 for the default model"
