"""Trains DFlash2 drafters on a target's own answers. Nothing that serves imports it."""
