"""Students: what replaces a teacher. `Copy` and `Reinit` keep its architecture; yours is any factory or module."""

from .base import Adapter, Factory, SiteInfo, StudentLike, build, check_call
from .basic import Copy, Normal, Reinit

__all__ = ["Adapter", "Copy", "Factory", "Normal", "Reinit", "SiteInfo", "StudentLike", "build", "check_call"]
