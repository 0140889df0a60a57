"""The methods; each file registers its own when this package is imported."""

import importlib
import pkgutil

from .base import METHODS, Align, Distill, Joint, Method, Stage, build, method

for _found in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_found.name}")

__all__ = ["METHODS", "Align", "Distill", "Joint", "Method", "Stage", "build", "method"]
