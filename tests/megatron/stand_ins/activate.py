"""Importing this module installs the stand-ins in this process; verl does so when ENVIRONMENT tells it to."""

from __future__ import annotations

from tests.megatron.stand_ins import patches, rewrite

rewrite.install()
patches.install()
