"""Which step of a running loop was slow, and in which phase, without a trace?"""
