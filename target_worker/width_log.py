"""What a Width chose anew, in the log."""

import logging
import time

from target_worker.width import Width

logger = logging.getLogger(__name__)

LOG_INTERVAL_S = 10.0
"""Changes are logged at this pace, the newest one."""


class WidthLog:
    """Tells now and then how many drafts are made."""

    def __init__(self) -> None:
        self._log_at = 0.0

    def look(self, width: Width) -> None:
        """Take what has changed. To be called after each step that the width has been told of."""
        changes = width.take_changes()
        if changes and time.monotonic() >= self._log_at:
            self._log_at = time.monotonic() + LOG_INTERVAL_S
            change = changes[-1]
            logger.info(
                "width requests<=%d drafts=%d before=%d gain=%.3f",
                change.num_reqs,
                change.now,
                change.before,
                change.gain,
            )
