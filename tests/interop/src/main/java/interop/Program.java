package interop;

import co.cask.cdap.api.dataset.lib.CloseableIterator;
import co.cask.cdap.common.conf.CConfiguration;
import co.cask.cdap.common.conf.Constants;
import co.cask.cdap.common.utils.TimeProvider;
import co.cask.cdap.messaging.MessageFetcher;
import co.cask.cdap.messaging.MessagingService;
import co.cask.cdap.messaging.RollbackDetail;
import co.cask.cdap.messaging.StoreRequest;
import co.cask.cdap.messaging.TopicMetadata;
import co.cask.cdap.messaging.client.ClientMessagingService;
import co.cask.cdap.messaging.client.StoreRequestBuilder;
import co.cask.cdap.messaging.data.RawMessage;
import co.cask.cdap.messaging.service.MessagingServices;
import co.cask.cdap.proto.id.NamespaceId;
import co.cask.cdap.proto.id.TopicId;
import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.net.InetSocketAddress;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.HexFormat;
import java.util.List;
import java.util.Map;
import org.apache.hadoop.conf.Configuration;
import org.apache.tephra.Transaction;
import org.apache.tephra.TransactionSystemClient;
import org.apache.tephra.TxConstants;
import org.apache.tephra.distributed.PooledClientProvider;
import org.apache.tephra.distributed.TransactionServiceClient;
import org.apache.tephra.inmemory.InMemoryTxSystemClient;
import org.apache.twill.discovery.Discoverable;
import org.apache.twill.discovery.InMemoryDiscoveryService;

/**
 * A program that publishes and consumes with CDAP's and Tephra's clients, or with a messaging service of CDAP. It
 * executes each JSON line of standard input and prints a line {@code {"result": …}} or
 * {@code {"error": class, "message": …}}. It keeps transactions and rollback details by the number in the response.
 */
public final class Program {
  private static final Output OUT = new Output();

  private final MessagingService messaging;
  private final TransactionSystemClient transactions;
  private final List<Transaction> begun = new ArrayList<>();
  private final List<RollbackDetail> published = new ArrayList<>();

  /**
   * Runs {@code Program PORT TRANSACTIONS_PORT} with servers on this machine, or {@code Program PLACE} with CDAP's
   * service on a store ({@link Store#open}) and transactions in memory.
   */
  public static void main(String[] args) throws Exception {
    Program program = args.length == 1
        ? new Program(args[0]) : new Program(Integer.parseInt(args[0]), Integer.parseInt(args[1]));
    BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
    for (String line = lines.readLine(); line != null; line = lines.readLine()) {
      JsonObject call = new JsonParser().parse(line).getAsJsonObject();
      try {
        OUT.line("result", program.call(call));
      } catch (Exception e) {
        OUT.line("error", e.getClass().getSimpleName(), "message", String.valueOf(e.getMessage()));
      }
      OUT.flush();
    }
    System.exit(0);
  }

  private Program(int port, int transactionsPort) {
    InMemoryDiscoveryService discovery = new InMemoryDiscoveryService();
    discovery.register(new Discoverable(Constants.Service.MESSAGING_SERVICE, address(port)));
    discovery.register(new Discoverable(
        TxConstants.Service.DEFAULT_DATA_TX_DISCOVERY_SERVICE_NAME, address(transactionsPort)));
    messaging = new ClientMessagingService(discovery);
    Configuration conf = new Configuration(false);
    transactions = new TransactionServiceClient(conf, new PooledClientProvider(conf, discovery), "program");
  }

  private Program(String place) throws IOException {
    CConfiguration conf = Main.configuration(place);
    messaging = MessagingServices.create(conf, Store.open(conf, place), TimeProvider.SYSTEM_TIME);
    transactions = new InMemoryTxSystemClient(TransactionSession.manager());
  }

  private static InetSocketAddress address(int port) {
    return new InetSocketAddress("127.0.0.1", port);
  }

  private Object call(JsonObject call) throws Exception {
    TopicId topic = new TopicId("default", text(call, "topic", "none"));
    switch (call.get("call").getAsString()) {
      case "create" -> messaging.createTopic(new TopicMetadata(topic, properties(call)));
      case "update" -> messaging.updateTopic(new TopicMetadata(topic, properties(call)));
      case "delete" -> messaging.deleteTopic(topic);
      case "get" -> {
        return messaging.getTopic(topic).getProperties();
      }
      case "list" -> {
        return messaging.listTopics(new NamespaceId(text(call, "namespace", "default"))).stream()
            .map(TopicId::getTopic).toList();
      }
      case "publish" -> {
        RollbackDetail detail = messaging.publish(messages(topic, call));
        if (detail == null) {
          return null;
        }
        published.add(detail);
        return published.size() - 1;
      }
      case "store" -> messaging.storePayload(messages(topic, call));
      case "rollback" -> messaging.rollback(topic, published.get(call.get("published").getAsInt()));
      case "fetch" -> {
        return fetch(topic, call);
      }
      case "begin" -> {
        begun.add(transactions.startShort());
        return begun.size() - 1;
      }
      case "commit" -> transactions.commitOrThrow(transaction(call));
      case "abort" -> transactions.abort(transaction(call));
      case "invalidate" -> transactions.invalidate(transaction(call).getTransactionId());
      default -> throw new IllegalArgumentException("unknown call " + call);
    }
    return true;
  }

  private List<Map<String, Object>> fetch(TopicId topic, JsonObject call) throws Exception {
    MessageFetcher fetcher = messaging.prepareFetch(topic);
    if (call.has("id")) {
      fetcher.setStartMessage(HexFormat.of().parseHex(text(call, "id", "")), call.get("inclusive").getAsBoolean());
    }
    if (call.has("time")) {
      fetcher.setStartTime(call.get("time").getAsLong());
    }
    if (call.has("limit")) {
      fetcher.setLimit(call.get("limit").getAsInt());
    }
    if (call.has("transaction")) {
      fetcher.setTransaction(transaction(call));
    }
    List<Map<String, Object>> found = new ArrayList<>();
    try (CloseableIterator<RawMessage> messages = fetcher.fetch()) {
      while (messages.hasNext()) {
        RawMessage message = messages.next();
        found.add(Output.map("id", Output.hex(message.getId()), "payload", Output.hex(message.getPayload())));
      }
    }
    return found;
  }

  private StoreRequest messages(TopicId topic, JsonObject call) {
    StoreRequestBuilder request = StoreRequestBuilder.of(topic);
    if (call.has("transaction")) {
      request.setTransaction(transaction(call).getWritePointer());
    }
    if (call.has("pointer")) {
      request.setTransaction(call.get("pointer").getAsLong());
    }
    if (call.has("messages")) {
      for (JsonElement message : call.getAsJsonArray("messages")) {
        request.addPayload(HexFormat.of().parseHex(message.getAsString()));
      }
    }
    return request.build();
  }

  private Transaction transaction(JsonObject call) {
    return begun.get(call.get("transaction").getAsInt());
  }

  private static Map<String, String> properties(JsonObject call) {
    Map<String, String> found = new HashMap<>();
    if (call.has("properties")) {
      call.getAsJsonObject("properties").entrySet()
          .forEach(entry -> found.put(entry.getKey(), entry.getValue().getAsString()));
    }
    return found;
  }

  private static String text(JsonObject call, String name, String otherwise) {
    return call.has(name) ? call.get(name).getAsString() : otherwise;
  }
}
