"""The names of Flower that code outside this folder uses. Flower loads the modules of all of them with `flwr.app`."""

from flwr.app import ArrayRecord as ArrayRecord
from flwr.app import ConfigRecord as ConfigRecord
from flwr.app import Context as Context
from flwr.app import Error as Error
from flwr.app import Message as Message
from flwr.app import MessageType as MessageType
from flwr.app import MetricRecord as MetricRecord
from flwr.app import RecordDict as RecordDict
from flwr.app.message.message import remove_content_from_message as remove_content_from_message
from flwr.clientapp import ClientApp as ClientApp
from flwr.common.constant import ErrorCode as ErrorCode
from flwr.serverapp import Grid as Grid
from flwr.serverapp import ServerApp as ServerApp
from flwr.serverapp.strategy import FedAvg as FedAvg
from flwr.serverapp.strategy import Result as Result
from flwr.serverapp.strategy import Strategy as Strategy
from flwr.supercore.task_identity import TaskIdentity as TaskIdentity
