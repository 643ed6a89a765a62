"""The progress bar; a plain line per step where there is no terminal."""

from typing import Any, Self

import rich.console
import rich.progress


class Progress:
  """Shows steps done, reward, KL and time left."""

  def __init__(self, steps: int, done: int = 0, *, quiet: bool = False):
    """Prepares a bar of `steps` steps, of which some are done."""
    self._console = rich.console.Console(quiet=quiet)
    self._bar = rich.progress.Progress(
      rich.progress.TextColumn('step'),
      rich.progress.MofNCompleteColumn(),
      rich.progress.BarColumn(bar_width=24),
      rich.progress.TextColumn('{task.description}'),
      rich.progress.TimeElapsedColumn(),
      rich.progress.TextColumn('left'),
      rich.progress.TimeRemainingColumn(),
      console=self._console,
      disable=quiet or not self._console.is_terminal,
    )
    self._task = self._bar.add_task('', total=steps, completed=done)
    self._steps = steps

  def __enter__(self) -> Self:
    """Shows the bar."""
    self._bar.start()
    return self

  def __exit__(self, *exception) -> None:
    """Leaves the bar as it is."""
    self._bar.stop()

  def note(self, text: str) -> None:
    """Says what is going on until the next step."""
    self._bar.update(self._task, description=text)

  def line(self, text: str) -> None:
    """Prints a line above the bar."""
    self._console.print(text, highlight=False)

  def step(self, record: dict[str, Any]) -> None:
    """Counts a step and shows its reward and KL."""
    kl = record['kl_exact']
    text = f'reward {record["reward_mean"]:.2f}'
    text += '' if kl is None else f'  KL {kl:.3f}'
    self._bar.update(self._task, advance=1, description=text)
    if not self._console.is_terminal:
      seconds = record['rollout_seconds'] + record['train_seconds']
      self.line(f'step {record["step"]}/{self._steps}  {text}  {seconds:.1f} s')
