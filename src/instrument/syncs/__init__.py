"""Which line makes the CPU wait for the GPU?"""
