package interop;

import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import java.io.BufferedReader;
import java.io.InputStream;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.HashSet;
import java.util.HexFormat;
import java.util.List;
import java.util.Map;
import java.util.Set;
import org.apache.hadoop.conf.Configuration;
import org.apache.tephra.Transaction;
import org.apache.tephra.TransactionConflictException;
import org.apache.tephra.TransactionManager;
import org.apache.tephra.TransactionSystemClient;
import org.apache.tephra.TxConstants;
import org.apache.tephra.distributed.PooledClientProvider;
import org.apache.tephra.distributed.TransactionServiceClient;
import org.apache.tephra.distributed.TransactionServiceThriftHandler;
import org.apache.tephra.distributed.thrift.TTransactionServer;
import org.apache.tephra.metrics.TxMetricsCollector;
import org.apache.tephra.persist.LocalFileTransactionStateStorage;
import org.apache.tephra.persist.NoOpTransactionStateStorage;
import org.apache.tephra.rpc.ThriftRPCServer;
import org.apache.tephra.snapshot.SnapshotCodecProvider;
import org.apache.twill.discovery.DiscoveryServiceClient;

/**
 * Executes calls of Tephra's client and manager from JSON lines {@code {"call": NAME, "args": [...]}}, and prints for
 * each a line {@code {"result": ...}} or {@code {"error": CLASS, "message": TEXT}}. It keeps transactions; calls use
 * their id.
 */
public final class TransactionSession {
  private static final Output OUT = new Output();

  private final Map<Long, Transaction> begun = new HashMap<>();
  private TransactionSystemClient client;

  private TransactionSession() {
  }

  public static void main(String[] args) throws Exception {
    TransactionSession session = new TransactionSession();
    BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
    for (String line = lines.readLine(); line != null; line = lines.readLine()) {
      JsonObject call = new JsonParser().parse(line).getAsJsonObject();
      try {
        OUT.line("result", session.call(call.get("call").getAsString(), new Words(call)));
      } catch (TransactionConflictException e) {
        OUT.line("error", e.getClass().getSimpleName(), "message", e.getMessage(), "transaction",
            e.getTransactionId(), "key", e.getConflictingKey(), "client", e.getConflictingClient());
      } catch (Exception e) {
        OUT.line("error", e.getClass().getSimpleName(), "message", e.getMessage());
      }
      OUT.flush();
    }
    // Not all threads of Tephra are daemons.
    System.exit(0);
  }

  private Object call(String name, Words args) throws Exception {
    return switch (name) {
      case "connect" -> connect((int) args.number(0), args.text(1));
      case "startShort" -> keep(args.count() == 0 ? client.startShort() : client.startShort((int) args.number(0)));
      case "startLong" -> keep(client.startLong());
      case "checkpoint" -> keep(client.checkpoint(transaction(args)));
      case "canCommit" -> {
        client.canCommitOrThrow(transaction(args), args.keys(1));
        yield null;
      }
      case "oldCanCommit" -> client.canCommit(transaction(args), args.keys(1));
      case "oldCommit" -> client.commit(transaction(args));
      case "commit" -> {
        client.commitOrThrow(transaction(args));
        yield null;
      }
      case "abort" -> {
        client.abort(transaction(args));
        yield null;
      }
      case "invalidate" -> client.invalidate(args.number(0));
      case "truncate" -> client.truncateInvalidTx(args.longs(0));
      case "truncateBefore" -> client.truncateInvalidTxBefore(args.number(0));
      case "invalidSize" -> client.getInvalidSize();
      case "status" -> client.status();
      case "prune" -> {
        client.pruneNow();
        yield null;
      }
      case "reset" -> {
        client.resetState();
        yield null;
      }
      case "getSnapshot" -> {
        try (InputStream bytes = client.getSnapshotInputStream()) {
          yield Snapshots.describe(new SnapshotCodecProvider(new Configuration(false)).decode(bytes));
        }
      }
      case "snapshot" -> Snapshots.describe(Snapshots.read(Path.of(args.text(0))));
      case "serve" -> serve();
      case "recover" -> recover(args.text(0));
      case "work" -> work(args.text(0));
      default -> throw new IllegalArgumentException("unknown call " + name);
    };
  }

  private String connect(int port, String name) {
    Configuration conf = new Configuration(false);
    conf.set(TxConstants.Service.CFG_DATA_TX_BIND_ADDRESS, "127.0.0.1");
    conf.setInt(TxConstants.Service.CFG_DATA_TX_BIND_PORT, port);
    // The default client repeats every failed call for half a minute, also rejected calls.
    conf.set(TxConstants.Service.CFG_DATA_TX_CLIENT_RETRY_STRATEGY, "n-times");
    conf.setInt(TxConstants.Service.CFG_DATA_TX_CLIENT_ATTEMPTS, 1);
    client = new TransactionServiceClient(conf, new PooledClientProvider(conf, (DiscoveryServiceClient) null), name);
    return client.status();
  }

  /** Returns a manager of Tephra without storage. */
  static TransactionManager manager() {
    Configuration conf = new Configuration(false);
    conf.setInt(TxConstants.Manager.CFG_TX_CLEANUP_INTERVAL, 0);
    TransactionManager manager = new TransactionManager(
        conf, new NoOpTransactionStateStorage(new SnapshotCodecProvider(conf)), new TxMetricsCollector());
    manager.startAndWait();
    return manager;
  }

  /** Starts a service of Tephra, which runs until the JVM exits, and returns its port. */
  private static int serve() {
    TransactionManager manager = manager();
    ThriftRPCServer<?, ?> server = ThriftRPCServer.builder(TTransactionServer.class).setHost("127.0.0.1").setPort(0)
        .setIOThreads(1).setWorkerThreads(2).setMaxReadBufferBytes(1 << 24)
        .build(new TransactionServiceThriftHandler(manager, null));
    server.startAndWait();
    return server.getBindAddress().getPort();
  }

  private Map<String, Object> keep(Transaction tx) {
    begun.put(tx.getTransactionId(), tx);
    return Output.map("id", tx.getTransactionId(), "readPointer", tx.getReadPointer(), "writePointer",
        tx.getWritePointer(), "invalids", tx.getInvalids(), "inProgress", tx.getInProgress(), "firstShort",
        tx.getFirstShortInProgress(), "type", tx.getType(), "checkpoints", tx.getCheckpointWritePointers());
  }

  private Transaction transaction(Words args) {
    return begun.get(args.number(0));
  }

  /** Returns the state that a manager of Tephra recovers from a directory; the manager writes a snapshot of it. */
  private static Map<String, Object> recover(String dir) throws Exception {
    TransactionManager manager = manager(dir);
    try {
      return Snapshots.describe(manager.getCurrentState());
    } finally {
      manager.stopAndWait();
    }
  }

  /** Continues in a directory with a manager of Tephra: commits, invalidates, and leaves a transaction in progress. */
  private static Map<String, Object> work(String dir) throws Exception {
    TransactionManager manager = manager(dir);
    try {
      Transaction committed = manager.startShort();
      manager.canCommit(committed.getTransactionId(), List.of(new byte[] {'k'}));
      manager.commit(committed.getTransactionId(), committed.getWritePointer());
      manager.invalidate(manager.startShort().getTransactionId());
      manager.checkpoint(manager.startLong());
      return Snapshots.describe(manager.getCurrentState());
    } finally {
      manager.stopAndWait();
    }
  }

  private static TransactionManager manager(String dir) {
    Configuration conf = new Configuration(false);
    conf.set(TxConstants.Manager.CFG_TX_SNAPSHOT_LOCAL_DIR, dir);
    conf.setInt(TxConstants.Manager.CFG_TX_CLEANUP_INTERVAL, 0);
    TxMetricsCollector metrics = new TxMetricsCollector();
    SnapshotCodecProvider codecs = new SnapshotCodecProvider(conf);
    TransactionManager manager = new TransactionManager(
        conf, new LocalFileTransactionStateStorage(conf, codecs, metrics), metrics);
    manager.startAndWait();
    return manager;
  }

  /** The typed arguments of a call. */
  private record Words(JsonObject call) {
    private JsonElement at(int index) {
      return call.getAsJsonArray("args").get(index);
    }

    int count() {
      return call.getAsJsonArray("args").size();
    }

    String text(int index) {
      return at(index).getAsString();
    }

    long number(int index) {
      return at(index).getAsLong();
    }

    Set<Long> longs(int index) {
      Set<Long> found = new HashSet<>();
      at(index).getAsJsonArray().forEach(number -> found.add(number.getAsLong()));
      return found;
    }

    List<byte[]> keys(int index) {
      List<byte[]> found = new ArrayList<>();
      at(index).getAsJsonArray().forEach(key -> found.add(HexFormat.of().parseHex(key.getAsString())));
      return found;
    }
  }
}
