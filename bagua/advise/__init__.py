"""The model of a step: what was measured once, and how long a step takes with an algorithm on a network."""

from bagua.advise.advice import Advice, advise
from bagua.advise.advice import check_wanted as check_wanted
from bagua.advise.advice import weigh as weigh
from bagua.advise.facts import CallFacts, MachineFacts, Message, ModelFacts, Moment, ParameterFacts, Rehearsal, Run
from bagua.advise.measure import LEAST_STEPS as LEAST_STEPS
from bagua.advise.measure import StepMeter as StepMeter
from bagua.advise.measure import measure_model, probe_machine
from bagua.advise.network import Cluster
from bagua.advise.prediction import Prediction, outside_calibration, predict
from bagua.advise.rehearse import rehearse
from bagua.advise.verdict import TorchWatch, watch

__all__ = ["Advice", "CallFacts", "Cluster", "MachineFacts", "Message", "ModelFacts", "Moment", "ParameterFacts"]
__all__ += ["Prediction", "Rehearsal", "Run", "TorchWatch", "advise", "measure_model", "outside_calibration", "predict"]
__all__ += ["probe_machine", "rehearse", "watch"]
