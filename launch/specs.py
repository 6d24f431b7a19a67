"""From the one config to each process's own: written as JSON into the run directory, and how to start it."""

import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from draft_worker.config import DraftConfig
from launch.child import ChildSpec
from launch.config import LaunchConfig
from launch.http.config import API_KEY_ENV, FrontConfig
from launch.models import Models
from launch.mps import ROLES as MPS_ROLES
from launch.mps import MpsDaemon
from launch.plan import MemoryPlan
from launch.policy import RULES
from memsvc.config import MemConfig
from memsvc.core.config import PoolConfig
from target_worker.config import TargetConfig
from tokenizer_proc.config import TokenizerConfig

PACKAGES = {
    "memsvc": "memsvc",
    "draft": "draft_worker",
    "target": "target_worker",
    "tokenizer": "tokenizer_proc",
    "front": "launch.http",
}

WORKER_ENV = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Unless the user says otherwise. Threads that spin at the end of a parallel loop take the cores from the other
processes, and then wait for the one among them that was put aside: ten to twenty times slower on a busy machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """All that is settled before the first process is started."""

    config: LaunchConfig
    model_path: Path
    models: Models
    pool: PoolConfig
    plan: MemoryPlan
    run_dir: Path
    listener: socket.socket
    """Kept open here, so that a front that restarts loses no connection attempt."""
    command: tuple[str, ...]
    """As typed, for people."""
    mps: MpsDaemon | None = None
    """What the workers run under; None without --mps on."""

    @property
    def roles(self) -> tuple[str, ...]:
        """Processes of this run, in the order of starting."""
        return tuple(role for role in RULES if role != "draft" or self.models.draft is not None)

    @property
    def served_names(self) -> tuple[str, ...]:
        """Names of the model on the API."""
        return self.config.served_model_name or (self.model_path.name,)

    def spec(self, role: str, generation: int) -> ChildSpec:
        """Write the config of one process and say how to start it. A later memory service gets a fresh MPS daemon."""
        config = self._config_of(role, generation)
        file = self.run_dir / f"{role}.json"
        file.write_bytes(msgspec.json.encode(config))
        env = WORKER_ENV | {name: value for name, value in os.environ.items() if name != API_KEY_ENV}
        if self.mps is not None and role in MPS_ROLES:
            if role == "memsvc" and generation > 1:
                self.mps.restart()
            env |= self.mps.env
        command = [sys.executable, "-m", PACKAGES[role], "--config", str(file)]
        if role != "front":
            return ChildSpec(command=command, env=env)
        if self.config.api_key:
            env[API_KEY_ENV] = self.config.api_key
        drain_s = self._front(generation).drain_s
        return ChildSpec(command=command, env=env, pass_fds=(self.listener.fileno(),), grace_s=drain_s + 5.0)

    def _config_of(self, role: str, generation: int) -> Any:
        match role:
            case "memsvc":
                return MemConfig(
                    run_dir=str(self.run_dir),
                    pool=self.pool,
                    supervised=True,
                    log_level=self.config.log_level,
                    device=self.config.torch_device,
                )
            case "draft":
                return self._draft()
            case "target":
                return self._target()
            case "tokenizer":
                return TokenizerConfig(
                    run_dir=str(self.run_dir),
                    model_path=str(self.model_path),
                    context_len=self.models.context_len,
                    log_level=self.config.log_level,
                )
            case _:
                return self._front(generation)

    def _draft(self) -> DraftConfig:
        config = self.config
        return DraftConfig(
            run_dir=str(self.run_dir),
            draft_path=config.draft_model_path,
            target_path=str(self.model_path),
            dtype=config.dtype,
            kv_cache_dtype=config.draft_kv_cache_dtype,
            device=config.torch_device,
            load_format=config.load_format,
            num_draft_tokens=self.models.num_drafts,
            propose_route=config.propose_route,
            max_running_requests=config.max_running_requests,
            context_len=self.models.context_len,
            num_threads=config.threads,
            spec_trace=config.spec_trace,
            disable_cuda_graph=config.disable_cuda_graph,
            cuda_graph_max_bs=config.cuda_graph_max_bs,
            log_level=config.log_level,
        )

    def _target(self) -> TargetConfig:
        config, draft = self.config, self.models.draft
        return TargetConfig(
            run_dir=str(self.run_dir),
            model_path=str(self.model_path),
            dtype=config.dtype,
            kv_cache_dtype=config.kv_cache_dtype,
            mamba_ssm_dtype=config.mamba_ssm_dtype,
            device=config.torch_device,
            load_format=config.load_format,
            quantization=config.quantization,
            page_size=config.page_size,
            max_running_requests=config.max_running_requests,
            max_prefill_tokens=config.prefill_tokens,
            context_len=self.models.context_len,
            draft=draft is not None,
            num_draft_tokens=self.models.num_drafts,
            widths=self.models.widths,
            target_layer_ids=draft.target_layer_ids if draft else (),
            simulate_accept_length=config.simulate_accept_length,
            num_threads=config.threads,
            spec_trace=config.spec_trace,
            cuda_graph_max_bs=config.cuda_graph_max_bs,
            disable_cuda_graph=config.disable_cuda_graph,
            attention_backend=config.attention_backend,
            log_level=config.log_level,
        )

    def _front(self, generation: int) -> FrontConfig:
        config = self.config
        return FrontConfig(
            run_dir=str(self.run_dir),
            model_path=str(self.model_path),
            served_model_names=self.served_names,
            context_len=self.models.context_len,
            host=config.host,
            port=config.port,
            listen_fd=self.listener.fileno(),
            requires_key=bool(config.api_key),
            generation=generation,
            max_running_requests=config.max_running_requests,
            max_queued_requests=config.max_queued_requests,
            page_size=config.page_size,
            draft_model_path=config.draft_model_path,
            block_size=self.models.block_size,
            widths=self.models.widths,
            propose_route=config.propose_route,
            plan=self.plan,
            launch_command=self.command,
            log_level=config.log_level,
        )
