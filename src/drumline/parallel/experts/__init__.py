"""Mixture of experts that drops no token: routing, the exchange between devices, the layer."""
