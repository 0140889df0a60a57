"""crossfade: replace modules inside a pretrained transformer without wrecking the model."""

from importlib.metadata import version

from . import schedules, students
from .errors import CrossfadeError, CrossfadeWarning
from .fade import Fade, handle
from .gates import Adaptive, Bernoulli, Deterministic, Gumbel
from .guidance import DeepFeatureGuidance
from .persist import load, save
from .plan import Plan, Swap
from .registry import register
from .surgery import install, stages
from .targets import Targets, select

__version__ = version("crossfade")

__all__ = [
    "Adaptive",
    "Bernoulli",
    "CrossfadeError",
    "CrossfadeWarning",
    "DeepFeatureGuidance",
    "Deterministic",
    "Fade",
    "Gumbel",
    "Plan",
    "Swap",
    "Targets",
    "handle",
    "install",
    "load",
    "register",
    "save",
    "schedules",
    "select",
    "stages",
    "students",
]
