"""Other people's systems, each as a preset of this project's policies and a few options of how it moves experts.

`policies.core.systems` declares them, `transforms` turns an option into other requests, times or a link, and `predict`
runs them. No engine knows of any of it.
"""
