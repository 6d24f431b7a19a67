"""`python -m launch`: plan the memory, start every process, serve until Ctrl-C."""

import asyncio
import logging
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from launch.card import read_card, with_prefill_tokens
from launch.config import LaunchConfig
from launch.device_taken import taken_line
from launch.drafter import with_drafter
from launch.dtype import with_dtype
from launch.flags import parse_flags, shown_command
from launch.http.listen import bind_tcp, url_of
from launch.models import check_folders, read_models
from launch.mps import MpsDaemon, mps_line
from launch.planner import make_plan
from launch.policy import MPS_RULES, RULES, AllUp, Policy
from launch.run_dir import run_directory
from launch.smollm2 import ensure_smollm2
from launch.smollm2_fetch import FetchError
from launch.specs import Run
from launch.supervisor import Patience, Supervisor
from memsvc.process import setup_logging

logger = logging.getLogger(__name__)

READY_LIMIT_S = 600.0
"""A process that is not ready after so long never will be; large models load for minutes."""


def main(argv: Sequence[str]) -> int:
    """The exit status: 0 after Ctrl-C or SIGTERM, 1 if it can't serve, 2 for a wrong flag."""
    config = parse_flags(argv)
    setup_logging("launch", config.log_level)
    try:
        with ExitStack() as stack:
            run = _prepare(config, shown_command(argv), stack)
            return asyncio.run(_supervise(run))
    except (ValueError, OSError, FetchError) as error:
        logger.critical("cannot serve: %s", error)
        return 1
    except KeyboardInterrupt:
        return 130


def _prepare(config: LaunchConfig, command: tuple[str, ...], stack: ExitStack) -> Run:
    listener = stack.enter_context(bind_tcp(config.host, config.port))
    model_path = Path(config.model_path).absolute() if config.model_path else ensure_smollm2()
    check_folders(config, model_path)
    config = with_dtype(with_drafter(config, model_path), model_path)
    models = read_models(config, model_path)
    card = read_card(config.device) if config.is_cuda else None
    if card is not None:
        config = with_prefill_tokens(config, card)
    pool, plan = make_plan(config, models, card=card)
    for line in plan.lines:
        logger.info("plan: %s", line)
    _warn(config)
    run_dir = stack.enter_context(run_directory(config.run_dir))
    if config.is_cuda:
        logger.info("%s", mps_line(is_on=config.has_mps))
    return Run(
        config=config,
        model_path=model_path,
        models=models,
        pool=pool,
        plan=plan,
        run_dir=run_dir,
        listener=listener,
        command=command,
        mps=stack.enter_context(MpsDaemon(run_dir)) if config.has_mps else None,
    )


def _warn(config: LaunchConfig) -> None:
    if config.simulate_accept_length:
        logger.warning("accept length is forced to %g: all text is meaningless", config.simulate_accept_length)
    if config.load_format == "dummy":
        logger.warning("weights are random: all text is meaningless")
    if config.host not in ("127.0.0.1", "::1", "localhost") and not config.api_key:
        logger.warning("listening on %s without --api-key: anyone who reaches it can use it", config.host)


async def _supervise(run: Run) -> int:
    def on_up(up: AllUp) -> None:
        if run.plan.device is not None:
            held = {role: num for role, num in supervisor.device_bytes.items() if num}
            # Without an answer of the driver there is nothing to say; that is no reason to stop.
            with suppress(ValueError):
                logger.info("%s", taken_line(run.plan, read_card(run.config.device), held))
        if up.is_first:
            print(ready_line(run, up.without), flush=True)
        else:
            logger.info("recovered, all processes serve%s", "".join(f", without {role}" for role in up.without))

    patience = Patience(ready_s=READY_LIMIT_S, hang_s=run.config.hang_timeout_s)
    supervisor = Supervisor(
        run.run_dir, Policy(run.roles, rules=MPS_RULES if run.mps else RULES), run.spec, on_up, patience
    )
    return await supervisor.run()


def ready_line(run: Run, without: tuple[str, ...] = ()) -> str:
    """The one line that says that requests are served, and with what; without: roles that failed to start."""
    speculation = "off"
    if run.models.draft is not None and "draft" not in without:
        block = f"auto,{run.models.block_size}" if run.models.widths else run.models.block_size
        speculation = f"dflash block={block} drafter={Path(run.config.draft_model_path).name}"
    return (
        f"ready {url_of(run.listener)} model={run.served_names[0]} max_running={run.config.max_running_requests}"
        f" pool={run.plan.arena_bytes} bytes ({run.plan.pool_tokens} tokens) speculation={speculation}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
