"""Stochastic rounding for optax: BF16 weights that learn at small steps."""

from sr_optax.chain import chain as chain
from sr_optax.chain import upcast as upcast
from sr_optax.forecast import forecast_sticking as forecast_sticking
from sr_optax.link import (
  NearestRoundingState as NearestRoundingState,
)
from sr_optax.link import (
  StochasticRoundingState as StochasticRoundingState,
)
from sr_optax.link import nearest_rounding as nearest_rounding
from sr_optax.link import stochastic_rounding as stochastic_rounding
from sr_optax.metrics import sticking_metrics as sticking_metrics
from sr_optax.rounding import round_with_bits as round_with_bits
from sr_optax.rounding import stochastic_round as stochastic_round
from sr_optax.rounding import stochastic_round_tree as stochastic_round_tree
from sr_optax.state import apply_updates as apply_updates
from sr_optax.state import init_from_shadow as init_from_shadow
from sr_optax.state import resync as resync
from sr_optax.state import shadow_params as shadow_params
