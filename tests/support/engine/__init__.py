"""Engines, services and batch generators under test."""
