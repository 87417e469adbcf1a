"""Other people's systems, each as a preset of this project's policies and a few options of how it moves experts."""
