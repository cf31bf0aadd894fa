from hypothesis import settings

# Runs share their machine, so a slow example says nothing about the code.
settings.register_profile("dynmo", deadline=None)
settings.load_profile("dynmo")
