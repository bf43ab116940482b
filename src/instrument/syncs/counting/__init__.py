"""Counts what a dry run does: operators, kernels, operations, bytes, copies, by pass, region, module and line."""
