"""Meshwright: see meshwright/__init__.py; this file lets tools resolve the rooms as packages."""
