"""The main job: formats x rules on one corpus, same seeds and data order, one table and one report."""
